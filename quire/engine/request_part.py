"""Front end's view of its requests: owner, backlog, and requests that run as several engine requests in turns."""

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
"""`EngineRequest.client` of a task's requests; a server sets it with the API key."""

EACH_STEP: ContextVar[bool] = ContextVar("each_step", default=False)
"""`EngineRequest.each_step` of a task's requests; a server sets it for streams that describe each chunk."""

IN_BACKGROUND: ContextVar[bool] = ContextVar("in_background", default=False)
"""`EngineRequest.is_background` of a task's requests; a server sets it for lines of batches."""

RATE_SECONDS = 10.0
"""Time constant in seconds of the average rate of prompts."""


class Backlog:
    """Prompt tokens waiting to be computed, with the rate of computation; bounds the queue and gives Retry-After."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._prompts: dict[str, int] = {}
        self.num_tokens = 0
        self.progress = (0.0, self._clock.now())
        """Computed prompt tokens, decayed by 1/e per RATE_SECONDS, and the time of that value."""

    def add_request(self, key: str, num_tokens: int) -> None:
        self._prompts[key] = num_tokens
        self.num_tokens += num_tokens

    def note_progress(self, keys: Iterable[str]) -> None:
        """Remove these requests, whose prompts are computed, and count their tokens for the rate."""
        if self._prompts:
            now = self._clock.now()
            num_tokens = sum(self.discard(key) for key in keys)
            self.progress = (decayed(self.progress, now) * RATE_SECONDS + num_tokens, now)

    def discard(self, key: str) -> int:
        """Forget a request that ended or got an output; returns its tokens."""
        num_tokens = self._prompts.pop(key, 0)
        self.num_tokens -= num_tokens
        return num_tokens

    def clear(self) -> None:
        self._prompts.clear()
        self.num_tokens = 0

    @property
    def seconds(self) -> float:
        """Seconds at the recent rate; infinite if no prompt was computed lately."""
        rate = decayed(self.progress, self._clock.now())
        return self.num_tokens / rate if rate else math.inf


def decayed(progress: tuple[float, float], now: float) -> float:
    """Recent rate in prompt tokens per second. progress: `Backlog.progress`."""
    num_tokens, at = progress
    return num_tokens * math.exp((at - now) / RATE_SECONDS) / RATE_SECONDS


class RequestPart(Protocol):
    """One of several engine requests for one caller's request, such as a choice of `n` or one of several prompts."""

    @property
    def group(self) -> object:
        """Object shared by all parts of the caller's request."""
        ...

    async def wait_turn(self, request: EngineRequest) -> EngineRequest:
        """Await the part's turn; returns the request for the engine."""
        ...

    def end_turn(self) -> None:
        """Let the next part take its turn; also called if the part never ran."""
        ...


class Preparations:
    """Counter of a front end's requests that are being tokenised or have waiting parts, before the engine knows them. A
    request of several parts counts once."""

    def __init__(self) -> None:
        self._num_waiting: Counter[object] = Counter()

    def __len__(self) -> int:
        return len(self._num_waiting)

    @contextlib.contextmanager
    def count(self, part: RequestPart | None) -> Iterator[None]:
        """Count a request or part until the engine gets it."""
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
    """Await the turn of `part`, yield the request for the engine, and end the turn. part None: the request starts at
    once."""
    if part is None:
        yield request
        return
    try:
        yield await part.wait_turn(request)
    finally:
        part.end_turn()
