"""A client that hangs up ends its request: streaming or not, running or still queued."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
"""Status of a request whose client hung up before the response began. Only the metrics show it."""


class ClientDisconnectedError(Exception):
    """The client hung up, so no response is sent."""


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; when the client hangs up first, cancel it, wait for its clean-up and raise ClientDisconnectedError.

    The request's body must have been read to its end: what `receive` tells after that is the hang-up.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_hang_up(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnectedError
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
