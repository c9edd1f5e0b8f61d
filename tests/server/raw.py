"""Bytes over sockets, to servers of small applications."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from quire.clock import VirtualClock
from quire.server.connection import BoundedHttpProtocol
from quire.server.http_protocol import HttpServer, make_http_server
from quire.server.json_bodies import JsonBodies
from quire.server.listener import bind
from quire.server.settings import ServerSettings

STATUS_LINE = re.compile(rb"HTTP/1\.1 (\d{3}) ")


@dataclass
class RawServer:
    """A server, what its application saw, and connections to it."""

    server: HttpServer
    clock: VirtualClock
    port: int
    app: Echo

    @property
    def connections(self) -> list[BoundedHttpProtocol]:
        return list(self.server.server_state.connections)  # type: ignore[arg-type]

    async def open(self, data: bytes = b"", **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, **options)
        writer.write(data)
        return reader, writer

    async def exchange(self, data: bytes) -> bytes:
        """Send `data` and return all that comes until the server hangs up."""
        reader, writer = await self.open(data)
        try:
            return await reader.read()
        finally:
            writer.close()

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await asyncio.sleep(0.002)

    async def until_idle(self) -> None:
        """Wait until no connection and no task is left."""
        await self.until(lambda: not self.connections and not self.server.server_state.tasks)

    def late(self, seconds: float) -> None:
        """Let time pass, and the server notice."""
        self.clock.advance(seconds)
        self.server.check_deadlines()


class Echo:
    """Answers a request with its path and body, unless the path asks for something else.

    /unread: does not read the body. /wait: answers once `release` is set, or notes the hang-up. /endless: answers for
    ever.
    """

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.seen: list[tuple[str, bytes]] = []
        self.headers: list[tuple[bytes, bytes]] = []
        self.num_hang_ups = 0
        self.num_chunks_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, body = scope["path"], b""
        if path != "/unread":
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.num_hang_ups += 1
                    return
                body += message.get("body", b"")
                more = message.get("more_body", False)
        self.seen.append((path, body))
        self.headers = scope["headers"]
        if path == "/wait" and await self._hangs_up(receive):
            self.num_hang_ups += 1
            return
        answer = b"%b:%b;" % (path.encode(), body)
        headers = [] if path == "/endless" else [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if path == "/endless":
            gone = asyncio.ensure_future(receive())
            while not gone.done():
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                self.num_chunks_sent += 1
                await asyncio.sleep(0)
            self.num_hang_ups += 1
            return
        await send({"type": "http.response.body", "body": answer})

    async def _hangs_up(self, receive: Receive) -> bool:
        gone = asyncio.ensure_future(receive())
        released = asyncio.ensure_future(self.release.wait())
        await asyncio.wait((gone, released), return_when=asyncio.FIRST_COMPLETED)
        released.cancel()
        gone.cancel()
        return not self.release.is_set()


@contextlib.asynccontextmanager
async def raw_server(**settings: Any) -> AsyncIterator[RawServer]:
    """A server of `Echo` on 127.0.0.1, whose time stands still."""
    given = ServerSettings(port=0, **settings)
    app, clock = Echo(), VirtualClock()
    server = make_http_server(app, given, shutdown_grace_seconds=2, clock=clock)  # type: ignore[arg-type]
    with bind(given) as listener:
        running = asyncio.ensure_future(server.serve(sockets=[listener.socket]))
        while not server.started:
            await asyncio.sleep(0.002)
        try:
            yield RawServer(server, clock, listener.socket.getsockname()[1], app)
        finally:
            server.should_exit = True
            await running


def statuses(answers: bytes) -> list[int]:
    """Of the answers in what a server sent."""
    return [int(status) for status in STATUS_LINE.findall(answers)]


def json_bodies_of(app: FastAPI) -> JsonBodies:
    """The middleware, in the stack of an application that has been called."""
    layer: Any = app.middleware_stack
    while not isinstance(layer, JsonBodies):
        layer = layer.app
    return layer
