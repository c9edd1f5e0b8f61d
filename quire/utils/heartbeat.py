"""Signs of life of a process: sending, hearing, and checks of progress.

A thread writes a byte into a pipe at every beat: the time without progress of the process's loop and threads. It stops
with the process, or when a thread never releases the interpreter.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

from quire.clock import Clock, SystemClock

BEAT_SECONDS = 0.5
SILENCE_LIMIT = 4.0
"""Seconds without a sign of life after which a process counts as unresponsive: eight beats."""
HUNG_ENGINE_TIMEOUT = 60.0
"""Default seconds of silence after which an engine hangs and `restart_engine` ends it."""
MAX_GAP = 2 * BEAT_SECONDS
"""Longest time between two looks that counts as silence."""
MIN_CPU_SHARE = 0.01
"""Share of one core below which a process does not compute. Beats and polling library threads use up to a third of
it."""
TENTHS = 10
"""Units of a beat's byte in a second; the byte is at most LONGEST."""
LONGEST = 190
FIRST_STOPPED = LONGEST + 1
"""Byte that names the first of the ranks as stopped; the bytes behind it name the others."""
IDLE = 255
"""Byte of a process without work."""


class Heartbeat:
    """Observer's side: time without a beat. Thread-safe. Only time that the observer has seen counts, `MAX_GAP` at
    most between two looks."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._looked_at = self._clock.now()
        self._silence = 0.0

    def beat(self, stalled: float = 0.0) -> None:
        """Note a beat. stalled: seconds without progress that it reports, at most LONGEST / TENTHS."""
        with self._lock:
            now = self._clock.now()
            so_far = self._silence + min(now - self._looked_at, MAX_GAP)
            self._silence = max(stalled, so_far) if stalled * TENTHS >= LONGEST else stalled
            self._looked_at = now

    def look(self) -> None:
        """Note that nothing was heard. Call at least every `MAX_GAP` seconds while listening."""
        with self._lock:
            now = self._clock.now()
            self._silence += min(now - self._looked_at, MAX_GAP)
            self._looked_at = now

    @property
    def silence(self) -> float:
        """Observed seconds since the last beat."""
        with self._lock:
            return self._silence + min(self._clock.now() - self._looked_at, MAX_GAP)


class Progress:
    """Time of a process without progress. Its loop calls `turn`, its beating thread `look`."""

    def __init__(self, clock: Clock | None = None, cpu_seconds: Callable[[], float] = time.process_time) -> None:
        """cpu_seconds: processor time of all threads of the process."""
        self._clock = clock or SystemClock()
        self._cpu_seconds = cpu_seconds
        self._num_turns = 0
        self._exemptions = 0
        self._last = (self._clock.now(), cpu_seconds(), 0)
        self._stalled = 0.0
        self.is_idle = False
        """True while the loop waits for orders."""

    def turn(self) -> None:
        self._num_turns += 1

    @contextlib.contextmanager
    def exempt(self) -> Iterator[None]:
        """Context for long work without the processor, such as reading weights from a slow disk."""
        self._exemptions += 1
        try:
            yield
        finally:
            self._exemptions -= 1

    def look(self) -> float:
        """Seconds without a turn or computation. Called at every beat, by one thread."""
        now, cpu, turns = self._clock.now(), self._cpu_seconds(), self._num_turns
        before, cpu_before, turns_before = self._last
        self._last = now, cpu, turns
        gap = min(now - before, MAX_GAP)
        if turns != turns_before or self._exemptions or cpu - cpu_before >= MIN_CPU_SHARE * gap:
            self._stalled = 0.0
        else:
            self._stalled += gap
        return self._stalled

    def byte(self) -> int:
        stalled = self.look()
        return IDLE if self.is_idle else encode_beat(stalled)


def encode_beat(stalled: float) -> int:
    return min(LONGEST, int(stalled * TENTHS))


def decode_beats(beats: bytes) -> float | None:
    """Seconds in the last of some beats; None: the process is idle, or names a stopped rank."""
    return None if beats[-1] > LONGEST else beats[-1] / TENTHS


def encode_stopped(rank: int) -> int:
    """Byte that names a stopped rank, one of IDLE - FIRST_STOPPED."""
    assert FIRST_STOPPED + rank < IDLE, "the byte of an idle process"
    return FIRST_STOPPED + rank


def decode_stopped(beats: bytes) -> int | None:
    """Rank that the last of some beats names as stopped; None: it names none."""
    return beats[-1] - FIRST_STOPPED if LONGEST < beats[-1] < IDLE else None


def start_beating(pipe: int, byte: Callable[[], int]) -> None:
    """Write `byte()` into `pipe` (a descriptor, made non-blocking here) at every beat, from a thread, until its reader
    is gone or the process ends."""
    os.set_blocking(pipe, False)

    def beat() -> None:
        while True:
            try:
                os.write(pipe, bytes([byte()]))
            except BlockingIOError:
                pass  # the reader is stopped, and has beats enough to read when it goes on
            except BrokenPipeError:
                return
            time.sleep(BEAT_SECONDS)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
