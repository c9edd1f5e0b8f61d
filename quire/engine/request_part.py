"""A caller's request that is run in several engine requests, which take turns."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from typing import Protocol

from quire.request import EngineRequest


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
