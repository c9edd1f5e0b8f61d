"""A tiny OpenAI-compatible server whose bytes a test decides, chunk by chunk."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reply:
    """What one request gets. parts: sent as one HTTP chunk each, `delay` seconds apart. close_early: the connection
    is cut without the end of the body."""

    parts: Sequence[bytes] = ()
    status: int = 200
    delay: float = 0.0
    close_early: bool = False


@dataclass
class OpenAIServer:
    """answer: number of the request (from 0) and its body -> Reply. num_together: answers wait until that many
    requests are open at once. Everything received is in `requests`."""

    answer: Callable[[int, dict[str, Any]], Reply]
    models: Reply = field(default_factory=lambda: Reply([json.dumps({"data": [{"id": "test-model"}]}).encode()]))
    requests: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_together: int = 1
    num_connections: int = 0
    num_open: int = 0
    most_open: int = 0
    base_url: str = ""
    sent_at: list[float] = field(default_factory=list)
    """When each part was sent, by time.perf_counter."""
    connections: set[asyncio.Task[None]] = field(default_factory=set)

    def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._connection(reader, writer))
        self.num_connections += 1
        self.connections.add(task)
        task.add_done_callback(self.connections.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {key.lower(): value for key, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        self.paths.append(path)
        self.headers.append(headers)
        if method == "GET":
            reply = self.models
        else:
            self.requests.append(json.loads(body))
            reply = self.answer(len(self.requests) - 1, self.requests[-1])
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            while method == "POST" and self.most_open < self.num_together:
                await asyncio.sleep(0.001)
            return await self._send(reply, writer)
        finally:
            self.num_open -= 1

    async def _send(self, reply: Reply, writer: asyncio.StreamWriter) -> bool:
        writer.write(f"HTTP/1.1 {reply.status} X\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for index, part in enumerate(reply.parts):
            await asyncio.sleep(reply.delay if index else 0)
            self.sent_at.append(time.perf_counter())
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
        if reply.close_early:
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


@contextmanager
def running(server: OpenAIServer) -> Iterator[OpenAIServer]:
    """Serve from a thread with an event loop of its own until the block ends."""
    ready, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        server.base_url = f"http://127.0.0.1:{port}"
        ready.set()
        await stop.wait()
        listener.close()
        for task in server.connections:
            task.cancel()
        await asyncio.gather(*server.connections, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(60)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def completion_parts(texts: Sequence[str], *, num_prompt_tokens: int | None = None) -> list[bytes]:
    """A `/v1/completions` stream, one part per event; with `num_prompt_tokens` it ends with usage."""
    parts = [event({"choices": [{"text": text, "finish_reason": None}]}) for text in texts]
    parts.append(event({"choices": [{"text": "", "finish_reason": "length"}]}))
    if num_prompt_tokens is not None:
        usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": len(texts)}
        parts.append(event({"choices": [], "usage": usage}))
    return [*parts, DONE]


def chat_parts(texts: Sequence[str]) -> list[bytes]:
    """A `/v1/chat/completions` stream without usage: role first, then the texts, then the finish."""
    deltas: list[tuple[dict[str, str], str | None]] = [({"role": "assistant", "content": ""}, None)]
    deltas += [({"content": text}, None) for text in texts]
    deltas.append(({}, "stop"))
    return [event({"choices": [{"delta": delta, "finish_reason": reason}]}) for delta, reason in deltas] + [DONE]
