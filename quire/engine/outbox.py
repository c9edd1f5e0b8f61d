"""The requests of one turn of the event loop are sent to the engine at once: its process is woken once for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.engine.client import EngineClient
from quire.engine.messages import AddRequest
from quire.errors import EngineDeadError, InternalError, QuireError
from quire.utils.failures import explain

Unsent = tuple[AddRequest, Callable[[QuireError], None]]
"""A request, and what hears why it could not be sent."""


class Outbox:
    """Used on one event loop only."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._unsent: list[Unsent] = []

    def __bool__(self) -> bool:
        return bool(self._unsent)

    def put(self, message: AddRequest, fail: Callable[[QuireError], None]) -> None:
        """Send a request at the end of this turn, or tell `fail` why not: it must not wait for its outputs."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self.flush)
        self._unsent.append((message, fail))

    def flush(self) -> None:
        """Send now what waits, for a message that must come behind it."""
        unsent, self._unsent = self._unsent, []
        if unsent:
            self._send(unsent)

    def _send(self, unsent: list[Unsent]) -> None:
        try:
            self._client.send(*(message for message, _ in unsent))
        except EngineDeadError as error:
            for _, fail in unsent:
                fail(error.again())
        except Exception as error:
            if len(unsent) > 1:  # nothing was sent: which of them cannot be?
                for one in unsent:
                    self._send([one])
                return
            failure = InternalError(f"the request could not be sent to the engine: {explain(error)}")
            failure.__cause__ = error
            unsent[0][1](failure)
