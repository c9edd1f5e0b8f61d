"""Signs of life of a process: how it gives them, how another one hears them, and whether it gets on.

A thread of the process writes a byte into a pipe at every beat: for how long the process has not got on. It is a thread
because a step may take minutes: native code releases the interpreter meanwhile, so the thread keeps writing. It stops
when the whole process is stopped (SIGSTOP, a frozen container, a machine out of memory that only swaps), and when one
thread never releases the interpreter.

A process gets on while its loop turns or its threads compute. One that is dead-locked does neither; one in a long step
uses the processor. A thread that waits for a CUDA device uses it as well, so a card that hangs is not told from a long
step.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

from quire.clock import Clock, SystemClock

BEAT_SECONDS = 0.5
"""Time between two beats."""
SILENCE_LIMIT = 4.0
"""Seconds without a sign of life after which a process counts as unresponsive: eight beats, so that a busy machine is
not taken for a stopped process. A dead-lock or a stopped rank is seen a beat or two later."""
HUNG_ENGINE_TIMEOUT = 60.0
"""Seconds of silence after which an engine hangs, and `restart_engine` ends it, where its user says nothing else: time
for a process that is looked at with a debugger, or that was swapped out, to come back."""
MAX_GAP = 2 * BEAT_SECONDS
"""Longest time between two looks that counts as silence. A longer one means that the observer itself did not run."""
MIN_CPU_SHARE = 0.01
"""Of one core: a process that uses less between two beats does not compute. Its beats, and threads of libraries that
look a hundred times a second whether something has come, use up to a third of it."""
TENTHS = 10
"""What a byte counts: tenths of a second, up to LONGEST."""
LONGEST = 254
IDLE = 255
"""The byte of a process that has nothing to do, and waits to be told."""


class Heartbeat:
    """The observer's side: for how long nothing has been heard. Any thread may use it.

    Only time that the observer has seen pass counts, `MAX_GAP` at most between two looks: when the whole machine is
    suspended, or both processes are stopped and go on together, the other one has not been silent.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._looked_at = self._clock.now()
        self._silence = 0.0

    def beat(self, stalled: float = 0.0) -> None:
        """Something was heard. stalled: seconds for which it says that it has not got on, at most LONGEST / TENTHS."""
        with self._lock:
            now = self._clock.now()
            so_far = self._silence + min(now - self._looked_at, MAX_GAP)
            self._silence = max(stalled, so_far) if stalled * TENTHS >= LONGEST else stalled
            self._looked_at = now

    def look(self) -> None:
        """Nothing was heard until now. Call at least every `MAX_GAP` seconds while listening."""
        with self._lock:
            now = self._clock.now()
            self._silence += min(now - self._looked_at, MAX_GAP)
            self._looked_at = now

    @property
    def silence(self) -> float:
        """Seconds since the last beat, as far as they were observed."""
        with self._lock:
            return self._silence + min(self._clock.now() - self._looked_at, MAX_GAP)


class Progress:
    """For how long a process has not got on. Its loop calls `turn`; the thread that beats looks."""

    def __init__(self, clock: Clock | None = None, cpu_seconds: Callable[[], float] = time.process_time) -> None:
        """cpu_seconds: processor time of all threads of the process so far."""
        self._clock = clock or SystemClock()
        self._cpu_seconds = cpu_seconds
        self._num_turns = 0
        self._exemptions = 0
        self._last = (self._clock.now(), cpu_seconds(), 0)
        self._stalled = 0.0
        self.is_idle = False
        """Whether the loop waits to be told what to do."""

    def turn(self) -> None:
        """The loop has begun another turn."""
        self._num_turns += 1

    @contextlib.contextmanager
    def exempt(self) -> Iterator[None]:
        """Around what may take long without the processor, such as to read weights from a slow disk."""
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
        """What a process says of itself alone."""
        stalled = self.look()
        return IDLE if self.is_idle else encode_beat(stalled)


def encode_beat(stalled: float) -> int:
    """The byte that says that a process has not got on for `stalled` seconds."""
    return min(LONGEST, int(stalled * TENTHS))


def decode_beats(beats: bytes) -> float | None:
    """What the last of some beats says: seconds; None: the process is idle."""
    return None if beats[-1] == IDLE else beats[-1] / TENTHS


def start_beating(pipe: int, byte: Callable[[], int]) -> None:
    """Write `byte()` into `pipe` (a file descriptor, made non-blocking here) at every beat, from a thread, until its
    reader is gone or the process ends."""
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
