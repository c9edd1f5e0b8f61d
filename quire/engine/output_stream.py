"""The asyncio side of one request: outputs wait here until its consumer takes them."""

from __future__ import annotations

import asyncio
from collections import deque

from quire.errors import QuireError
from quire.outputs import RequestOutput


class OutputStream:
    """Used on one event loop only.

    request_id: as the caller knows it. key: what front end and core call the request; never used twice, so that what
    the core still sends of an aborted request cannot reach a later one of the same id.
    delta: every output is kept; otherwise a newer output replaces one that was not taken yet, so that a slow consumer
    of cumulative outputs costs no memory.
    """

    def __init__(self, request_id: str, key: str, *, delta: bool) -> None:
        self.request_id = request_id
        self.key = key
        self._delta = delta
        self._outputs: deque[RequestOutput] = deque()
        self._error: QuireError | None = None
        self._news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        if not self._delta:
            self._outputs.clear()
        self._outputs.append(output)
        self._news.set()

    def fail(self, error: QuireError) -> None:
        """`get` raises `error` once the outputs before it are taken."""
        self._error = error
        self._news.set()

    async def get(self) -> RequestOutput:
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        return self._outputs.popleft()
