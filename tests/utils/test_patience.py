"""Waiting for a process that computes, and not for one that is stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from quire.utils import patience
from quire.utils.patience import Patience, processor_seconds

BUSY = "import sys\nprint('begun', flush=True)\nwhile True: pass"


@pytest.fixture
def busy() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process.pid
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "SLICE_SECONDS", 0.05)


def test_a_stopped_process_is_not_waited_for(busy: int, pair: tuple[socket.socket, socket.socket]) -> None:
    os.kill(busy, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        Patience(busy, 2).apply(pair[0])
    with pytest.raises(TimeoutError):
        Patience(busy, 2).send(pair[0], b"x" * 2**24)


def test_a_process_that_computes_is_waited_for(
    busy: int, pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def look(pid: int) -> float | None:
        nonlocal looks
        looks += 1
        if looks == 20:
            pair[1].send(b"x")
        return float(looks)

    monkeypatch.setattr(patience, "processor_seconds", look)
    Patience(busy, 2).apply(pair[0])
    assert looks == 20


def test_processor_time_is_that_of_the_process(busy: int) -> None:
    seconds = processor_seconds(os.getpid())
    assert seconds is not None
    assert seconds > 0
    assert processor_seconds(busy) is not None
    assert processor_seconds(2**22 + 1) is None
