"""Whether an engine process responds: its heartbeat, and the time limits of calls to it.

A thread of the engine process writes one byte a second into a pipe, the one whose end says that the process has ended.
It is a thread because a step may take minutes: native code releases the interpreter meanwhile, so the thread keeps
writing. It stops writing when the whole process is stopped (SIGSTOP, a frozen container, a machine out of memory that
only swaps), and when one thread never releases the interpreter.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

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


CALL_SECONDS = 20.0
"""A call is handled between two steps, so this is the longest step that a call waits for. Less than the time limit of
`quire top` (30 s), so that its user reads why."""
LONG_CALL_SECONDS = 1800.0
"""For calls that work: to sleep and to wake move the weights or load them, a registered prefix is computed."""
LONG_CALLS = frozenset({"sleep", "wake_up", "register_prefix"})

T = TypeVar("T")


def patience(method: str) -> float:
    """Seconds that a call may take."""
    return LONG_CALL_SECONDS if method in LONG_CALLS else CALL_SECONDS


async def wait_for_answer(
    answer: asyncio.Future[T], method: str, silence: Callable[[], float], *, limit: float | None = None
) -> T:
    """The result of `answer`, which the receiver's thread sets.

    silence: `EngineClient.silence`. limit: seconds; None: as `patience` says. Raises EngineUnresponsiveError when the
    engine process falls silent or the time is over; `answer` is then still pending.
    """
    limit = patience(method) if limit is None else limit
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit
    while not answer.done():
        check_responsive(silence())
        remaining = deadline - loop.time()
        if remaining <= 0:
            raise EngineUnresponsiveError(
                f"the engine did not answer the call {method!r} within {limit:g} s: a step or another call takes longer"
            )
        await asyncio.wait((answer,), timeout=min(remaining, BEAT_SECONDS))
    return answer.result()
