"""A failure inside a stream is an event of it, whatever class it has."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from quire.errors import InternalError
from quire.server.streaming import EventStream
from tests.fakes.panic import Panic


async def run(first: list[bytes], error: BaseException) -> list[dict[str, Any]]:
    """What a client is sent."""
    sent: list[dict[str, Any]] = []

    async def events() -> AsyncGenerator[bytes, None]:
        for event in first:
            yield event
        raise error

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    await EventStream(events())({"type": "http"}, receive, send)
    return sent


async def test_a_panic_in_a_stream_is_its_last_event() -> None:
    start, first, last, end = await run([b"data: 1\n\n"], Panic("engine.rs:7: index out of range"))
    assert (start["status"], first["body"]) == (200, b"data: 1\n\n")
    told = json.loads(last["body"].removeprefix(b"data: "))["error"]
    assert told["code"] == "internal_error"
    assert "engine.rs" not in told["message"]
    assert end == {"type": "http.response.body", "body": b"", "more_body": False}


async def test_a_panic_before_the_first_event_is_an_error_that_handlers_know() -> None:
    with pytest.raises(InternalError, match="the stream failed"):
        await run([], Panic("index out of range"))


@pytest.mark.parametrize("error", [asyncio.CancelledError(), GeneratorExit()])
async def test_what_asks_the_task_to_stop_is_no_event(error: BaseException) -> None:
    with pytest.raises(type(error)):
        await run([b"data: 1\n\n"], error)
