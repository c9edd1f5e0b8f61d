"""A failure inside a stream is an event of it, whatever class it has."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from quire.errors import InternalError
from quire.server.connection import CHUNK_WRITER, ChunkWriter
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


class Cycle:
    """As much of a connection's cycle as a ChunkWriter looks at."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.flow = self
        self.transport = self
        self.write_paused = self.disconnected = self.response_complete = False
        self.chunked_encoding = True

    def write(self, data: bytes) -> None:
        self.written.append(data)


async def test_events_behind_the_first_go_straight_to_the_connection() -> None:
    cycle, sent = Cycle(), []

    async def events() -> AsyncGenerator[bytes, None]:
        for number in range(5):
            cycle.write_paused = number == 3
            yield b"data: %d\n\n" % number

    async def send(message: Any) -> None:
        sent.append(message.get("body"))

    async def receive() -> Any:
        await asyncio.Event().wait()

    scope = {"type": "http", CHUNK_WRITER: ChunkWriter(cycle)}  # type: ignore[arg-type]
    await EventStream(events())(scope, receive, send)
    assert sent == [None, b"data: 0\n\n", b"data: 3\n\n", b""]
    assert cycle.written == [b"9\r\ndata: %d\n\n\r\n" % number for number in (1, 2, 4)]


@pytest.mark.parametrize(
    ("field", "value"),
    [("write_paused", True), ("disconnected", True), ("response_complete", True), ("chunked_encoding", False)],
)
def test_a_chunk_that_must_go_the_usual_way_is_not_written(field: str, value: bool) -> None:
    cycle = Cycle()
    setattr(cycle, field, value)
    assert not ChunkWriter(cycle).write(b"x")  # type: ignore[arg-type]
    assert not ChunkWriter(Cycle()).write(b""), "an empty chunk would be the last one"  # type: ignore[arg-type]
    assert cycle.written == []
