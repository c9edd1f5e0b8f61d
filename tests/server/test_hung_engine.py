"""An engine that stops, dies or has clients that do not read: each costs what it must and no more."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.engine.process_client import ProcessClient
from quire.server.settings import ServerSettings
from quire.utils.heartbeat import SILENCE_LIMIT
from tests.server.conftest import Served, serving, serving_apart
from tests.server.sse import events

GUARD_SECONDS = 120
"""Against a test that hangs; nothing here takes so long."""


@pytest.fixture
async def apart(model_path: Path) -> AsyncIterator[Served]:
    """The application over an engine in a process of its own."""
    async with serving_apart(model_path, max_num_seqs=100, executor="slow_between_signals") as served:
        yield served


def pid_of(served: Served) -> int:
    client = served.engine._session.client
    assert isinstance(client, ProcessClient)
    return client.pid


async def until_health(served: Served, status: int) -> httpx.Response:
    while (response := await served.client.get("/health")).status_code != status:
        await asyncio.sleep(0.05)
    return response


async def silence_of(apart: Served) -> float:
    metrics = (await apart.client.get("/metrics")).text
    [gauge] = [line for line in metrics.splitlines() if line.startswith("quire_engine_silence_seconds ")]
    return float(gauge.split()[1])


async def test_a_stopped_engine_process(apart: Served) -> None:
    """When it goes on, its steps take no time: the test is not about them."""
    body = {"prompt": "abc", "max_tokens": 150}
    running = asyncio.ensure_future(apart.client.post("/v1/completions", json=body))
    await apart.until_running(1)
    os.kill(pid_of(apart), signal.SIGSTOP)
    try:
        async with asyncio.timeout(GUARD_SECONDS):
            response = await until_health(apart, 503)
            assert "the engine process is stopped" in response.json()["error"]["message"]
            for method, path in (("GET", "/debug/kv"), ("GET", "/debug/kv/events"), ("POST", "/v1/completions")):
                refused = await apart.client.request(method, path, json=body if method == "POST" else None)
                assert refused.status_code == 503, path
                assert "the engine process is stopped" in refused.json()["error"]["message"]
            while await silence_of(apart) < SILENCE_LIMIT:
                await asyncio.sleep(0.05)
            assert (await apart.client.get("/version")).status_code == 200
            assert not running.done(), "a request that has begun waits"
    finally:
        os.kill(pid_of(apart), signal.SIGCONT)
    os.kill(pid_of(apart), signal.SIGUSR1)
    async with asyncio.timeout(GUARD_SECONDS):
        await until_health(apart, 200)
        assert (await running).json()["usage"]["completion_tokens"] == 150
        assert (await apart.client.get("/debug/kv")).status_code == 200


async def test_a_hundred_streams_hear_of_the_engine_s_death(model_path: Path) -> None:
    body = {"prompt": "abc", "max_tokens": 200, "stream": True}
    async with (
        serving_apart(model_path, max_num_seqs=100, executor="very_slow") as apart,
        asyncio.timeout(GUARD_SECONDS),
    ):
        running = [asyncio.ensure_future(apart.client.post("/v1/completions", json=body)) for _ in range(100)]
        while len(apart.engine._session._keys) < 100 or apart.engine.num_queued_tokens:  # until each has a token
            await asyncio.sleep(0.01)
        os.kill(pid_of(apart), signal.SIGKILL)
        answers = await asyncio.gather(*running)
        health = await until_health(apart, 503)
        assert {answer.status_code for answer in answers} == {200}
        [message] = {events(answer.text)[-1]["error"]["message"] for answer in answers}
        assert message == health.json()["error"]["message"]
        assert "SIGKILL" in message
        assert f"(error {apart.engine.dead_error.error_id}; the server's log says more)" in message
        assert apart.engine.num_unfinished == apart.engine.num_pending == 0


class StalledClient:
    """Asks for a stream and takes nothing of it but its head."""

    def __init__(self, served: Served, body: dict[str, Any]) -> None:
        self._content: bytes | None = json.dumps({**body, "stream": True}).encode()
        self._leaves = asyncio.Event()
        self.has_begun = asyncio.Event()
        app = served.client._transport.app  # type: ignore[attr-defined]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        self._running = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def leave(self) -> None:
        self._leaves.set()
        await self._running

    async def _receive(self) -> dict[str, Any]:
        if self._content is not None:
            content, self._content = self._content, None
            return {"type": "http.request", "body": content, "more_body": False}
        await self._leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.has_begun.set()
        if message["type"] == "http.response.body":
            await self._leaves.wait()


async def test_clients_that_do_not_read_shut_no_door(model_path: Path) -> None:
    settings = ServerSettings(max_num_queued=2)
    async with serving(model_path, settings, max_num_seqs=1) as served, asyncio.timeout(GUARD_SECONDS):
        clients = []
        for _ in range(6):
            clients.append(StalledClient(served, {"prompt": "abc", "max_tokens": 150}))
            await clients[-1].has_begun.wait()
            while served.engine.num_pending or served.engine.num_running:
                await asyncio.sleep(0.005)
        assert served.engine.num_unfinished == 6, "none of them has read its answer"
        answer = await served.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
        assert answer.status_code == 200, answer.text
        assert (await served.client.get("/load")).json() == {"server_load": 0}
        for client in clients:
            await client.leave()
        assert served.engine.num_unfinished == 0
