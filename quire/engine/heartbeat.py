"""Responsiveness of an engine: its silence, and the time limits of calls.

At every beat (quire/utils/heartbeat.py) the engine process sends the time since all its ranks last made progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from quire.engine.messages import Call, ClientMessage
from quire.errors import EngineUnresponsiveError
from quire.executors.interface import VitalSigns
from quire.utils.heartbeat import BEAT_SECONDS, SILENCE_LIMIT, Progress, encode_beat, encode_stopped

ENGINE_STOPPED = -1
"""Rank number that stands for the engine process itself."""


def name_stopped(stopped: int | None) -> str:
    """Clause that names the stopped process, for an error text; "" if none. stopped: rank, or ENGINE_STOPPED."""
    if stopped is None:
        return ""
    return "the engine process is stopped" if stopped == ENGINE_STOPPED else f"rank {stopped} is stopped"


def check_responsive(silence: float, stopped: int | None = None) -> None:
    """Raise EngineUnresponsiveError if `silence` (seconds) exceeds SILENCE_LIMIT, or a process is stopped."""
    if stopped is not None:
        raise EngineUnresponsiveError(f"{name_stopped(stopped)} (SIGSTOP; SIGCONT lets it go on)")
    if silence >= SILENCE_LIMIT:
        raise EngineUnresponsiveError(f"the engine process has not answered for {silence:.0f} s")


class EngineBeats:
    """Source of the engine process's beats. vital_signs: reads the workers' signs; None while the engine starts, when
    only the end of the process counts. A beat is a byte sent to the parent."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.vital_signs: Callable[[], VitalSigns] | None = None

    def byte(self) -> int:
        if self.vital_signs is None:
            return 0
        ranks = self.vital_signs()
        if ranks.stopped is not None:
            return encode_stopped(ranks.stopped)
        return encode_beat(max(ranks.silence, min(self.progress.look(), ranks.stalled)))


CALL_SECONDS = 20.0
"""Seconds allowed for a call, which waits for the current step."""
LONG_CALL_SECONDS = 1800.0
"""Seconds allowed for LONG_CALLS, which move or load weights, or compute a prefix."""
LONG_CALLS = frozenset({"sleep", "wake_up", "register_prefix", "stop_replica", "start_replica"})

T = TypeVar("T")


def takes_long(message: ClientMessage) -> bool:
    return isinstance(message, Call) and message.method in LONG_CALLS


def patience(method: str) -> float:
    """Seconds for which a caller waits for the answer to a control call; longer for slow methods."""
    return LONG_CALL_SECONDS if method in LONG_CALLS else CALL_SECONDS


async def wait_for_answer(
    answer: asyncio.Future[T], method: str, silence: Callable[[], float], *, limit: float | None = None
) -> T:
    """Await `answer`, which the receiver's thread sets. silence: `EngineClient.silence`. limit: seconds; None:
    `patience(method)`. Raises EngineUnresponsiveError if the engine falls silent or the time is over; `answer` stays
    pending."""
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
