"""Plugin of pytest that lets races show: `DELAYS=7 pytest -p tests.delays tests/engine`, again with other seeds.

For each test it makes some functions of the engine and of the tests slow, each in one thread, at their call or their
return: always the same few milliseconds. A test that then fails has found a race, in the engine or in itself; the same
seed finds it again, mostly. What child processes do is not delayed.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import zlib
from types import CodeType, FrameType

import pytest

SEED = os.environ.get("DELAYS", "0")
SHARE = 0.1
"""Of the functions."""
SECONDS = (0.002, 0.005, 0.01, 0.03)
MAX_SECONDS = 3.0
"""In one test."""
QUICK = ("/models/", "/kernels/", "/layers/", "/simulator/", "/quantization/")
"""Rooms that only compute."""

_sleep = time.sleep


class Delays:
    def __init__(self) -> None:
        self._test = ""
        self._slept = 0.0
        self._seconds: dict[tuple[CodeType, str, int], float] = {}

    def begin(self, test: str) -> None:
        self._test, self._slept = test, 0.0
        self._seconds.clear()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Called by the interpreter (`sys.setprofile`)."""
        if event not in ("call", "return"):
            return
        key = (frame.f_code, event, threading.get_ident())
        seconds = self._seconds.get(key)
        if seconds is None:
            seconds = self._seconds[key] = self._chosen(*key)
        if seconds and self._slept < MAX_SECONDS:
            self._slept += seconds
            _sleep(seconds)

    def _chosen(self, code: CodeType, event: str, thread: int) -> float:
        path = code.co_filename
        if not ("/quire/" in path or "/tests/" in path) or "site-packages" in path or any(r in path for r in QUICK):
            return 0.0
        drawn = zlib.crc32(f"{SEED} {self._test} {code.co_qualname} {event} {thread}".encode())
        return SECONDS[drawn >> 20 & 3] if (drawn & 0xFFFF) < SHARE * 0x10000 else 0.0


DELAYS = Delays()


def pytest_sessionstart() -> None:
    threading.setprofile(DELAYS)
    sys.setprofile(DELAYS)


def pytest_sessionfinish() -> None:
    threading.setprofile(None)
    sys.setprofile(None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    DELAYS.begin(item.nodeid)
