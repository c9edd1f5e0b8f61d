"""Server-sent events in OpenAI's form: `data: {...}`, an empty line, and `data: [DONE]` at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.errors import is_interrupt, panics_are_errors
from quire.server.connection import CHUNK_WRITER, ChunkWriter
from quire.server.disconnect import ClientDisconnectedError, run_until_disconnect
from quire.server.errors import ApiError, error_body, to_api_error

DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def encode_event(chunk: msgspec.Struct) -> bytes:
    return b"data: %b\n\n" % _encoder.encode(chunk)


TEXT_MARK = "\0text\0"
"""Placeholder for the text of a chunk whose other fields are known."""
_ENCODED_MARK = _encoder.encode(TEXT_MARK)


class EventTemplate:
    """Event of chunks that differ only in one text. chunk: has TEXT_MARK in its place."""

    __slots__ = ("_after", "_before")

    def __init__(self, chunk: msgspec.Struct) -> None:
        self._before, found, self._after = encode_event(chunk).partition(_ENCODED_MARK)
        assert found, "the chunk has the mark"

    def event(self, text: str) -> bytes:
        return b"%b%b%b" % (self._before, _encoder.encode(text), self._after)


class EventStream(Response):
    """Response that sends `events`. An error before the first event is an ordinary error
    response, a later one the last event. A client that hangs up closes `events`."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str] | None = None,
        *,
        error_event: Callable[[ApiError, Scope], bytes] | None = None,
    ) -> None:
        """error_event: encodes an error; None: as OpenAI's chat completions do."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self.events = events
        self._error_event = error_event or _error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(receive, self._send_events(send, scope))
        except ClientDisconnectedError:
            return

    async def _send_events(self, send: Send, scope: Scope) -> None:
        writer: ChunkWriter | None = scope.get(CHUNK_WRITER)  # None if another HTTP server runs the application
        started = False
        async with aclosing(self.events) as events:
            try:
                async for event in events:
                    if writer is not None and started and writer.write(event):
                        continue
                    if not started:
                        started = True
                        await send(self._start())
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except BaseException as error:  # includes panics of native extensions
                if is_interrupt(error) or isinstance(error, asyncio.CancelledError):
                    raise
                if not started:
                    with panics_are_errors("the stream"):
                        raise
                event = self._error_event(to_api_error(error), scope)
                await send({"type": "http.response.body", "body": event, "more_body": True})
        if not started:
            await send(self._start())
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _start(self) -> Message:
        return {"type": "http.response.start", "status": 200, "headers": self.raw_headers}


def _error_event(error: ApiError, scope: Scope) -> bytes:
    return b"data: %b\n\n" % error_body(error, scope)
