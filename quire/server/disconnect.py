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

    The request's body must have been read to its end: what `receive` tells after that is the hang-up. `work` runs in
    the caller's own task, which the hang-up cancels as `asyncio.timeout` would.
    """
    task = asyncio.current_task()
    assert task is not None
    is_working, has_left = True, False

    def leave(watching: asyncio.Future[None]) -> None:
        nonlocal has_left
        if is_working and not watching.cancelled():
            has_left = True
            task.cancel()

    watching = asyncio.ensure_future(_hang_up(receive))
    watching.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if has_left and task.uncancel() == 0:
            raise ClientDisconnectedError from None
        raise
    finally:
        is_working = False
        watching.cancel()


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
