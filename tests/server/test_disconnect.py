"""A client that hangs up frees what its request held: streaming, not streaming, and while still queued."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from quire.server.disconnect import ClientDisconnectedError, run_until_disconnect
from tests.server.conftest import Served, serving

HALF = b"host: quire\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
LONG = {"prompt": "abc", "max_tokens": 250}
CHAT = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 200}
KINDS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"stream": True},
    {"stream": True, "n": 3},
    {"n": 2, "use_beam_search": True, "temperature": 0},
]
RUNNING = [
    *(("/v1/completions", LONG, kind) for kind in [*KINDS, {"n": 2, "best_of": 4}]),
    *(("/v1/chat/completions", CHAT, kind) for kind in KINDS),
]


async def send(served: Served, path: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request on a connection of its own, and leave it open."""
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: quire\r\ncontent-length: {len(content)}\r\n"
    writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + content)
    return reader, writer


async def statuses(served: Served, num_requests: int) -> set[str]:
    """Statuses of generating requests, once /metrics has counted `num_requests`: a moment after the engine is idle."""
    while True:
        text = (await served.client.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith("quire_http_requests_total") and 'POST"' in line]
        if sum(float(line.split()[-1]) for line in lines) >= num_requests:
            return {line.split('status="')[1][:3] for line in lines}
        await asyncio.sleep(0.005)


async def num_aborted(served: Served) -> float:
    """How many requests /metrics has counted as aborted."""
    text = (await served.client.get("/metrics")).text
    [line] = [line for line in text.splitlines() if 'request_success_total{engine="0",finished_reason="abort"' in line]
    return float(line.split()[-1])


@pytest.mark.parametrize(("path", "body", "more"), RUNNING)
async def test_while_running(live: Served, path: str, body: dict[str, Any], more: dict[str, Any]) -> None:
    reader, writer = await send(live, path, {**body, **more})
    await live.until_running(1)
    if "stream" in more:
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    assert (await live.engine.stats()).num_used_blocks > 0
    writer.close()
    await live.until_idle()
    assert live.engine.num_unfinished == 0
    while await num_aborted(live) < 1:
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
async def test_while_queued(model_path: Path, stream: bool) -> None:
    async with serving(model_path, executor="slow", live=True, max_num_seqs=1) as served:
        _, running = await send(served, "/v1/completions", LONG)
        await served.until_running(1)
        _, queued = await send(served, "/v1/completions", {**LONG, "stream": stream})
        while (await served.engine.stats()).num_waiting < 1:
            await asyncio.sleep(0.005)
        queued.close()
        while (await served.engine.stats()).num_waiting > 0:
            await asyncio.sleep(0.005)
        assert served.engine.num_unfinished == 1, "the running request is not the one that left"
        assert (await served.engine.stats()).num_running == 1
        running.close()
        await served.until_idle()
        assert await statuses(served, 2) == {"499"}


async def test_a_list_of_prompts(live: Served) -> None:
    _, writer = await send(live, "/v1/completions", {**LONG, "prompt": ["abc", "abd", "abe"], "n": 2})
    await live.until_running(3)
    writer.close()
    await live.until_idle()


async def test_one_bad_prompt_ends_its_siblings(live: Served) -> None:
    response = await live.client.post("/v1/completions", json={**LONG, "prompt": ["abc", "abd", "a" * 300]})
    assert response.status_code == 400
    await live.until_idle()


async def test_in_the_middle_of_the_body(live: Served) -> None:
    host, port = live.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\n" + HALF + b'{"prompt": ')
    await writer.drain()
    writer.close()
    response = await live.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
    assert response.status_code == 200
    assert live.engine.num_unfinished == 0


async def test_is_no_internal_error(
    live: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    _, waiting = await send(live, "/v1/completions", LONG)
    await live.until_running(1)
    waiting.close()
    await live.until_idle()
    host, port = live.url.removeprefix("http://").split(":")
    _, sending = await asyncio.open_connection(host, int(port))
    sending.write(b"POST /v1/chat/completions HTTP/1.1\r\n" + HALF + b"{")
    await sending.drain()
    sending.close()
    assert await statuses(live, 2) == {"499"}
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_the_end_of_a_stream_is_not_a_hang_up(live: Served) -> None:
    for _ in range(2):
        response = await live.client.post("/v1/completions", json={"prompt": "=abc", "stream": True})
        assert response.text.endswith("data: [DONE]\n\n")
    await live.until_idle()
    assert await statuses(live, 2) == {"200"}
    assert await num_aborted(live) == 0


async def test_a_hang_up_behind_the_end_of_the_work_cancels_nothing() -> None:
    left = asyncio.Event()

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    async def work() -> int:
        left.set()
        return 1

    assert await run_until_disconnect(receive, work()) == 1
    for _ in range(5):
        await asyncio.sleep(0)


async def test_only_the_hang_up_is_told_as_one() -> None:
    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    running = asyncio.ensure_future(run_until_disconnect(receive, asyncio.Event().wait()))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    async def hang_up() -> Message:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnectedError):
        await run_until_disconnect(hang_up, asyncio.Event().wait())
