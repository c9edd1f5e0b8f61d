from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
"""Status, only in metrics, of a request whose client hung up before the response began."""


class ClientDisconnectedError(Exception):
    """The client hung up; no response is sent."""


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`. If the client hangs up, cancel it, wait for its clean-up and raise ClientDisconnectedError.

    The body must have been read in full, so `receive` returns the hang-up.
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
