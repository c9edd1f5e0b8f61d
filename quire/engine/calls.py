"""How long a call to the engine may take: nothing waits without end for a core that does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from quire.engine.heartbeat import BEAT_SECONDS, check_responsive
from quire.errors import EngineUnresponsiveError

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
