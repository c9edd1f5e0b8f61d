"""What a front end knows of requests besides their outputs: whose they are, what waits, and a caller's request that is
run in several engine requests, which take turns."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextvars import ContextVar
from typing import Protocol

from quire.clock import Clock, SystemClock
from quire.request import EngineRequest

CLIENT_NAME: ContextVar[str] = ContextVar("client", default="")
"""Whose requests a task makes (`EngineRequest.client`): a server sets it where it checks a key."""

EACH_STEP: ContextVar[bool] = ContextVar("each_step", default=False)
"""How a task wants its tokens (`EngineRequest.each_step`): a server sets it for streams that say what a chunk has."""

RATE_SECONDS = 10.0
"""Over which the rate of prompts is averaged."""


class Backlog:
    """Prompt tokens of the requests that the engine has and that have got nothing yet, and how fast they get fewer."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._prompts: dict[str, int] = {}
        self.num_tokens = 0
        self.progress = (0.0, self._clock.now())
        """Tokens of the prompts that were computed, those of RATE_SECONDS ago counting 1/e; and when that was so."""

    def add_request(self, key: str, num_tokens: int) -> None:
        self._prompts[key] = num_tokens
        self.num_tokens += num_tokens

    def note_progress(self, keys: Iterable[str]) -> None:
        """The engine has told something of these requests: their prompts are computed."""
        if self._prompts:
            now = self._clock.now()
            num_tokens = sum(self.discard(key) for key in keys)
            self.progress = (decayed(self.progress, now) * RATE_SECONDS + num_tokens, now)

    def discard(self, key: str) -> int:
        """Forget a request; returns what it counted."""
        num_tokens = self._prompts.pop(key, 0)
        self.num_tokens -= num_tokens
        return num_tokens

    def clear(self) -> None:
        self._prompts.clear()
        self.num_tokens = 0

    @property
    def seconds(self) -> float:
        """How long it takes at the rate of late; infinite when no prompt was computed lately."""
        rate = decayed(self.progress, self._clock.now())
        return self.num_tokens / rate if rate else math.inf


def decayed(progress: tuple[float, float], now: float) -> float:
    """Tokens a second of prompts that were computed of late. progress: `Backlog.progress`."""
    num_tokens, at = progress
    return num_tokens * math.exp((at - now) / RATE_SECONDS) / RATE_SECONDS


class RequestPart(Protocol):
    """One of the engine requests that a caller's request is run in."""

    @property
    def group(self) -> object:
        """The same object for all parts of one caller's request."""
        ...

    async def wait_turn(self, request: EngineRequest) -> EngineRequest:
        """Wait for its turn; returns what the engine gets."""
        ...

    def end_turn(self) -> None:
        """It is over, or was never begun."""
        ...


class Preparations:
    """What is on its way to the engine: requests that are being tokenised, and those that have parts of which the
    engine has not heard yet. A request counts once, however many parts of it wait."""

    def __init__(self) -> None:
        self._num_waiting: Counter[object] = Counter()

    def __len__(self) -> int:
        return len(self._num_waiting)

    @contextlib.contextmanager
    def count(self, part: RequestPart | None) -> Iterator[None]:
        """Around what happens before the engine gets a request, or a part of one."""
        group = object() if part is None else part.group
        self._num_waiting[group] += 1
        try:
            yield
        finally:
            self._num_waiting[group] -= 1
            if not self._num_waiting[group]:
                del self._num_waiting[group]


@contextlib.asynccontextmanager
async def turn_of(part: RequestPart | None, request: EngineRequest) -> AsyncGenerator[EngineRequest, None]:
    """Wait for the turn of `part`, yield what the engine gets, and end the turn. A request of one part has no turns."""
    if part is None:
        yield request
        return
    try:
        yield await part.wait_turn(request)
    finally:
        part.end_turn()
