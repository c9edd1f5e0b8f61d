"""GET /debug/kv and its events, against a server whose engine is real up to the fake executor."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from quire.dashboard.feed import Feed
from quire.dashboard.frame import Frame
from quire.kv_cache.block_pool import CACHED_STATE, FREE_STATE
from quire.kv_cache.stats import EngineStats, shares
from quire.server.openapi import api_description
from quire.server.settings import ServerSettings
from quire.utils.sse import EventParser
from tests.server.conftest import NUM_BLOCKS, Served, serving
from tests.server.serve_process import Process

LONG = {"prompt": "a" * 40, "max_tokens": 200, "n": 4, "temperature": 1.0}


def count_polls(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that grows with every snapshot that the engine is asked for."""
    polls: list[None] = []
    ask = served.engine.kv_snapshot

    async def counted() -> Any:
        polls.append(None)
        return await ask()

    monkeypatch.setattr(served.engine, "kv_snapshot", counted)
    return polls


def feed_of(served: Served) -> Feed:
    owners = [getattr(close, "__self__", None) for close in served.context.on_close]
    [feed] = [owner for owner in owners if isinstance(owner, Feed)]
    return feed


@asynccontextmanager
async def watching(served: Served, path: str = "/debug/kv/events"):  # type: ignore[no-untyped-def]
    """The frames of an event stream; leaving it hangs up."""
    async with served.client.stream("GET", path) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")

        async def frames():  # type: ignore[no-untyped-def]
            parser = EventParser()
            async for data in response.aiter_raw():
                for event in parser.feed(data):
                    yield msgspec.json.decode(event, type=Frame)

        stream = frames()
        try:
            yield stream
        finally:
            await stream.aclose()


async def test_the_schema_that_the_document_describes(served: Served) -> None:
    await served.client.post("/v1/completions", json={"prompt": "a" * 40, "max_tokens": 3})
    response = await served.client.get("/debug/kv")
    assert response.headers["cache-control"] == "no-store"
    frame = response.json()
    assert frame["model"] == "tiny"
    assert frame["kv"]["block_size"] == 16
    assert frame["kv"]["windows"] == [None]
    assert frame["kv"]["requests"] == []
    assert frame["stats"]["generation_tokens_total"] == 3
    assert frame["stats"]["num_blocks"] == NUM_BLOCKS
    assert frame["shares"] == shares(msgspec.convert(frame["stats"], EngineStats))
    assert frame["time_to_first_token"]["count"] == 1
    assert frame["time_to_first_token"]["sum"] > 0
    states = base64.b64decode(frame["kv"]["states"])
    assert len(states) == NUM_BLOCKS + 1
    assert states.count(CACHED_STATE) == frame["stats"]["num_cached_blocks"] == 2
    assert states.count(FREE_STATE) == NUM_BLOCKS + 1 - 2
    described = {
        name for schema in api_description()["components"]["schemas"].values() for name in schema.get("properties", ())
    }
    assert set(names_in(frame)) <= described


def names_in(value: Any) -> Iterator[str]:
    """Names of fields at every depth but those of statistics and shares, which have their own place, and counts by
    reason."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield name
        if name not in ("stats", "shares", "outcomes"):
            yield from names_in(inner)


async def test_requests_and_their_tables(live: Served) -> None:
    post = asyncio.ensure_future(live.client.post("/v1/completions", json={**LONG, "request_id": "mine"}))
    async with watching(live) as frames:
        async for frame in frames:
            if any(sequence.num_output_tokens > 1 for r in frame.kv.requests for sequence in r.sequences):
                break
    [request] = frame.kv.requests
    assert request.request_id.startswith("cmpl-mine#")
    assert (request.status, request.num_prompt_tokens, len(request.sequences)) == ("running", 41, 4)
    first_blocks = {sequence.tables[0][0] for sequence in request.sequences}
    assert len(first_blocks) == 1, "the prompt's blocks are shared"
    assert frame.kv.states[first_blocks.pop()] == 4
    await live.engine.abort(list(live.engine._session._keys))
    await post
    await live.until_idle()
    after = msgspec.json.decode((await live.client.get("/debug/kv")).content, type=Frame)
    assert after.kv.requests == []
    assert set(after.kv.states) <= {FREE_STATE, CACHED_STATE}


async def test_without_a_viewer_the_engine_is_not_asked(live: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    live.hurry()
    polls = count_polls(live, monkeypatch)
    await live.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 20})
    assert polls == []
    async with watching(live) as frames:
        await anext(frames)
    while feed_of(live).num_viewers:  # until the server has seen that the viewer hung up
        await asyncio.sleep(0.005)
    seen = len(polls)
    assert seen > 0
    await live.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 20})
    assert len(polls) == seen


async def test_several_viewers_share_the_polls(live: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = asyncio.Event()
    ask = live.engine.kv_snapshot

    async def held() -> Any:
        await gate.wait()
        return await ask()

    monkeypatch.setattr(live.engine, "kv_snapshot", held)
    polls = count_polls(live, monkeypatch)

    async def look() -> bytes:
        async with watching(live) as frames:
            return msgspec.json.encode(await anext(frames))

    looking = [asyncio.ensure_future(look()) for _ in range(6)]
    while feed_of(live).num_viewers < 6 or not polls:
        await asyncio.sleep(0.005)
    assert len(polls) == 1, "all of them wait for the first one's poll"
    gate.set()
    assert len(set(await asyncio.gather(*looking))) <= len(polls)


@pytest.mark.parametrize("rate", ["0", "-1", "11", "nan", "inf", "fast", ""])
async def test_a_rate_out_of_bounds(served: Served, rate: str) -> None:
    response = await served.client.get("/debug/kv/events", params={"rate": rate})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "rate"


async def test_a_dead_engine(model_path: Path) -> None:
    async with serving(model_path, executor="failing", live=True) as served, watching(served) as frames:
        await anext(frames)
        post = asyncio.ensure_future(served.client.post("/v1/completions", json=LONG))
        with pytest.raises(msgspec.ValidationError, match="missing required field"):
            async for _ in frames:
                pass
        assert (await post).status_code == 503
        for path in ("/debug/kv", "/debug/kv/events"):
            response = await served.client.get(path)
            assert response.status_code == 503
            assert "the engine core failed (error " in response.json()["error"]["message"]


async def test_a_key_guards_the_memory_and_not_the_page(model_path: Path) -> None:
    async with serving(model_path, ServerSettings(api_key=["key"], served_model_name=["secret-name"])) as served:
        for path in ("/debug/kv", "/debug/kv/events"):
            assert (await served.client.get(path)).status_code == 401
        page = await served.client.get("/", headers={"Accept": "text/html"})
        assert page.status_code == 200
        assert "secret-name" not in page.text
        response = await served.client.get("/debug/kv", headers={"Authorization": "Bearer key"})
        assert response.json()["model"] == "secret-name"


@pytest.mark.long
def test_a_viewer_sees_the_drain_and_does_not_delay_the_end(model_path: Path) -> None:
    process = Process(model_path).wait_ready()
    parser = EventParser()
    with httpx.Client(base_url=process.url, timeout=120) as client, client.stream("GET", "/debug/kv/events") as events:
        frames = (json.loads(event) for data in events.iter_raw() for event in parser.feed(data))
        with client.stream(
            "POST", "/v1/completions", json={"prompt": "abc", "max_tokens": 200, "stream": True}
        ) as post:
            lines = post.iter_lines()
            next(lines)
            process.signal(signal.SIGTERM)
            while not next(frames)["is_draining"]:
                pass
            process.hurry()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        # The stream comes to its regular end (else httpx raises).
        assert all(frame["is_draining"] for frame in frames)
    status, error = process.finish()
    assert status == 0
    assert "Cancel" not in error
