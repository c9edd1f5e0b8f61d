"""A caller's request that is run in several engine requests, which take turns."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Protocol

from quire.request import EngineRequest


class RequestPart(Protocol):
    """One of the engine requests that a caller's request is run in."""

    async def wait_turn(self, request: EngineRequest) -> EngineRequest:
        """Wait for its turn; returns what the engine gets."""
        ...

    def end_turn(self) -> None:
        """It is over, or was never begun."""
        ...


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
