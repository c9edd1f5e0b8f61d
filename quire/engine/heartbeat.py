"""Whether an engine responds: how long it may be silent, and the time limits of calls to it.

The engine process says at every beat (quire/utils/heartbeat.py) for how long it has not got on. Of a model that several
ranks share it speaks for all of them: it is silent when one of them is stopped, and when none of them gets on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from quire.engine.messages import Call, ClientMessage
from quire.errors import EngineUnresponsiveError
from quire.executors.interface import VitalSigns
from quire.utils.heartbeat import BEAT_SECONDS, SILENCE_LIMIT, Progress, encode_beat


def check_responsive(silence: float) -> None:
    """Raise EngineUnresponsiveError when `silence` (seconds) is over the limit."""
    if silence >= SILENCE_LIMIT:
        raise EngineUnresponsiveError(f"the engine process has not answered for {silence:.0f} s")


class EngineBeats:
    """What the engine process says of itself and its ranks. vital_signs: of the workers; None while the engine starts,
    when all that counts is that the process has not ended."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.vital_signs: Callable[[], VitalSigns] | None = None

    def byte(self) -> int:
        if self.vital_signs is None:
            return 0
        ranks = self.vital_signs()
        return encode_beat(max(ranks.silence, min(self.progress.look(), ranks.stalled)))


CALL_SECONDS = 20.0
"""A call is handled between two steps, so this is the longest step that a call waits for. Less than the time limit of
`quire top` (30 s), so that its user reads why."""
LONG_CALL_SECONDS = 1800.0
"""For calls that work: to sleep and to wake move the weights or load them, as the start of a replica does, a registered
prefix is computed."""
LONG_CALLS = frozenset({"sleep", "wake_up", "register_prefix", "stop_replica", "start_replica"})

T = TypeVar("T")


def takes_long(message: ClientMessage) -> bool:
    """Whether a message is a call that works."""
    return isinstance(message, Call) and message.method in LONG_CALLS


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
