"""Readers of helpers: functions that they run."""

from __future__ import annotations

import os
import signal


def spin(argument: str, content: bytes) -> bytes:
    """Never ends."""
    while True:
        pass


def echo(argument: str, content: bytes) -> bytes:
    return content


def limit(argument: str, content: bytes) -> bytes:
    return str(signal.getitimer(signal.ITIMER_PROF)[0]).encode()


def spin_briefly(argument: str, content: bytes) -> bytes:
    """As `spin`, with less than the whole time."""
    signal.setitimer(signal.ITIMER_PROF, 0.05)
    return spin(argument, content)


def hoard(argument: str, content: bytes) -> bytes:
    return bytes(2**27)


def crash(argument: str, content: bytes) -> bytes:
    os.kill(os.getpid(), signal.SIGSEGV)
    return spin(argument, content)
