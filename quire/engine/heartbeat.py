"""Signs of life of an engine process: how its front end tells a long step from a process that has stopped.

A thread of the engine process writes one byte a second into a pipe, the one whose end says that the process has ended.
It is a thread because a step may take minutes: native code releases the interpreter meanwhile, and beats go on. They
stop when the whole process is stopped (SIGSTOP, a frozen container, a machine out of memory that only swaps), and when
one thread keeps the interpreter to itself.
"""

from __future__ import annotations

import os
import threading
import time

from quire.clock import Clock, SystemClock
from quire.errors import EngineUnresponsiveError

BEAT_SECONDS = 1.0
"""Time between two beats."""
SILENCE_LIMIT = 5.0
"""Seconds without a sign of life after which the engine counts as unresponsive: five beats, so that a busy machine is
not taken for a stopped process."""
MAX_GAP = 2 * BEAT_SECONDS
"""Longest time between two looks that counts as silence. A longer one means that the observer itself did not run."""


class Heartbeat:
    """The observer's side: for how long nothing has been heard. Any thread may use it.

    Only time that the observer has seen pass counts, `MAX_GAP` at most between two looks: when the whole machine is
    suspended, or both processes are stopped and go on together, the engine has not been silent.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._looked_at = self._clock.now()
        self._silence = 0.0

    def beat(self) -> None:
        """Something was heard."""
        with self._lock:
            self._looked_at = self._clock.now()
            self._silence = 0.0

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


def check_responsive(silence: float) -> None:
    """Raise EngineUnresponsiveError when `silence` (seconds) is over the limit."""
    if silence >= SILENCE_LIMIT:
        raise EngineUnresponsiveError(f"the engine process has not answered for {silence:.0f} s")


def start_beating(pipe: int) -> None:
    """Write a byte a second into `pipe` (a file descriptor, made non-blocking here) from a thread, until its reader is
    gone or the process ends."""
    os.set_blocking(pipe, False)

    def beat() -> None:
        while True:
            try:
                os.write(pipe, b".")
            except BlockingIOError:
                pass  # the reader is stopped, and has beats enough to read when it goes on
            except BrokenPipeError:
                return
            time.sleep(BEAT_SECONDS)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
