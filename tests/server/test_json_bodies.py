"""Bodies are JSON, and those that are being received take no more together than they may."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from quire.server.errors import ApiError
from quire.server.json_bodies import FREE_BODY_BYTES, JsonBodies
from quire.server.settings import ServerSettings
from tests.server.conftest import Served, serving
from tests.server.raw import json_bodies_of

BODY = json.dumps({"prompt": "a", "max_tokens": 1}).encode()


class TestTypes:
    @pytest.mark.parametrize(
        "kind",
        [
            "application/json",
            "APPLICATION/JSON",
            "application/json; charset=utf-8",
            'application/json;charset="UTF-8"',
            "application/vnd.api+json",
            "application/json; profile=x",
        ],
    )
    async def test_json(self, served: Served, kind: str) -> None:
        response = await served.client.post("/v1/completions", content=BODY, headers={"Content-Type": kind})
        assert response.status_code == 200, response.text

    @pytest.mark.parametrize(
        "kind",
        [
            None,
            "",
            "text/plain",
            "text/plain; application/json",
            "text/json",
            "multipart/form-data; boundary=application/json",
            "application/x-www-form-urlencoded",
            "application/jsonp",
            "text/plain+json",
            "application/json, text/plain",
            "application/json; charset=utf-16",
            "x" * 60_000,
        ],
    )
    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    async def test_anything_else_is_415(self, served: Served, kind: str | None, path: str) -> None:
        headers = {} if kind is None else {"Content-Type": kind}
        for method in ("POST", "PUT"):
            response = await served.client.request(method, path, content=BODY, headers=headers)
            assert response.status_code == 415
            assert response.json()["error"]["code"] == "unsupported_media_type"
            assert "application/json" in response.json()["error"]["message"]
            assert len(response.content) < 500

    async def test_an_unknown_route_is_404_whatever_the_body(self, served: Served) -> None:
        for path in ("/v1/complete", "/v1/completions/x", "/sleep"):
            response = await served.client.post(path, content=BODY, headers={"Content-Type": "text/plain"})
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "unknown_url"

    async def test_two_types(self, served: Served) -> None:
        headers = [("Content-Type", "application/json"), ("Content-Type", "text/plain")]
        assert (await served.client.post("/v1/completions", content=BODY, headers=headers)).status_code == 415

    async def test_without_a_length(self, served: Served) -> None:
        async def parts() -> AsyncIterator[bytes]:
            yield BODY

        assert (await served.client.post("/v1/completions", content=parts())).status_code == 415
        response = await served.client.post(
            "/v1/completions", content=parts(), headers={"Content-Type": "application/json"}
        )
        assert response.status_code == 200

    async def test_compressed(self, served: Served) -> None:
        for coding, status in (("gzip", 415), ("identity", 200)):
            headers = {"Content-Type": "application/json", "Content-Encoding": coding}
            assert (await served.client.post("/v1/completions", content=BODY, headers=headers)).status_code == status

    async def test_no_body_needs_no_type(self, model_path: Path) -> None:
        async with serving(model_path, ServerSettings(enable_sleep_mode=True)) as served:
            for path in ("/ping", "/sleep", "/wake_up"):
                assert (await served.client.post(path)).status_code == 200
            assert (await served.client.post("/ping", headers={"Content-Length": "0"})).status_code == 200


class Reader:
    """An application that reads a body, and asks for what comes after it once `done` is set."""

    def __init__(self) -> None:
        self.done = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await self.done.wait()
        await receive()
        await asyncio.Event().wait()


class Sender:
    """One request to `bodies`, whose body comes when told to."""

    def __init__(self, bodies: JsonBodies) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        headers = [(b"transfer-encoding", b"chunked"), (b"content-type", b"application/json")]
        scope = {"type": "http", "headers": headers}
        self.task = asyncio.ensure_future(bodies(scope, self.messages.get, self.send))

    async def send(self, message: Message) -> None:
        raise AssertionError(message)

    async def part(self, num_bytes: int, *, more: bool = True) -> None:
        self.messages.put_nowait({"type": "http.request", "body": b"x" * num_bytes, "more_body": more})
        for _ in range(5):
            await asyncio.sleep(0)


class TestInFlight:
    async def test_is_counted_until_the_application_is_done_with_it(self) -> None:
        reader = Reader()
        bodies = JsonBodies(reader, 1000)
        first = Sender(bodies)
        await first.part(FREE_BODY_BYTES)
        assert bodies.num_bytes == 0
        await first.part(600)
        await first.part(400, more=False)
        assert bodies.num_bytes == 1000
        small, large = Sender(bodies), Sender(bodies)
        await small.part(FREE_BODY_BYTES, more=False)
        await large.part(FREE_BODY_BYTES + 1)
        with pytest.raises(ApiError) as caught:
            await large.task
        assert caught.value.status == 503
        assert caught.value.headers == {"Retry-After": "1"}
        assert "--max-total-body-size" in caught.value.detail.message
        assert not small.task.done(), "small bodies come in whatever large ones do"
        reader.done.set()
        await first.part(0, more=False)
        assert bodies.num_bytes == 0, "while the answer is being made"
        assert not first.task.done()
        for sender in (first, small):
            sender.task.cancel()
        await asyncio.gather(first.task, small.task, return_exceptions=True)
        assert bodies.num_bytes == 0

    async def test_a_client_that_leaves_gives_it_back(self) -> None:
        bodies = JsonBodies(Reader(), 1000)
        sender = Sender(bodies)
        await sender.part(FREE_BODY_BYTES + 700)
        assert bodies.num_bytes == 700
        sender.task.cancel()
        await asyncio.gather(sender.task, return_exceptions=True)
        assert bodies.num_bytes == 0

    async def test_half_bodies_of_a_server(self, model_path: Path) -> None:
        """They hold what they may and no more; small requests are served, and all is as before once they are gone."""
        size, limit = 300_000, 500_000
        settings = ServerSettings(max_body_size=limit, max_total_body_size=limit)
        async with serving(model_path, settings, live=True) as served:
            port = int(served.url.rpartition(":")[2])

            async def half() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                head = f"POST /v1/completions HTTP/1.1\r\nhost: quire\r\ncontent-length: {size}\r\n"
                writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + b" " * (size - 1))
                await writer.drain()
                return reader, writer

            async def answer(reader: asyncio.StreamReader) -> bytes:
                return await reader.readuntil(b"}}")

            halves = [await half() for _ in range(6)]
            answers = [asyncio.ensure_future(answer(reader)) for reader, _ in halves]
            held = limit // (size - 1 - FREE_BODY_BYTES)
            while sum(task.done() for task in answers) < len(halves) - held:
                await asyncio.sleep(0.005)
            for task in answers:
                if task.done():
                    assert task.result().startswith(b"HTTP/1.1 503 ")
                    assert b"retry-after: 1\r\n" in task.result()
            json_body: dict[str, Any] = {"prompt": "a", "max_tokens": 1}
            assert (await served.client.post("/v1/completions", json=json_body)).status_code == 200
            for _, writer in halves:
                writer.close()
            for task in answers:
                task.cancel()
            await asyncio.gather(*answers, return_exceptions=True)
            assert served.app is not None
            bodies = json_bodies_of(served.app)
            while bodies.num_bytes:
                await asyncio.sleep(0.005)
            headers = {"Content-Type": "application/json"}
            response = await served.client.post("/v1/completions", content=BODY + b" " * size, headers=headers)
            assert response.status_code == 200, response.text
