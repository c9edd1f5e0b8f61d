"""Doors: 429 when too many wait, 503 while draining."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from quire.clock import VirtualClock
from quire.engine.messages import AddRequest, ClientMessage
from quire.engine.request_part import RATE_SECONDS, Backlog
from quire.server.settings import ServerSettings
from tests.server.conftest import serving

LONG = {"prompt": "abc", "max_tokens": 250}


async def test_too_many_waiting_requests_are_refused(model_path: Path) -> None:
    settings = ServerSettings(max_num_queued=2)
    async with serving(model_path, settings, executor="slow", max_num_seqs=1) as served:
        admitted = []
        for num_running, num_waiting in ((1, 0), (1, 1), (1, 2)):
            admitted.append(asyncio.ensure_future(served.client.post("/v1/completions", json=LONG)))
            while (stats := await served.engine.stats()) and (stats.num_running, stats.num_waiting) != (
                num_running,
                num_waiting,
            ):
                await asyncio.sleep(0.005)
        for path, refused in (
            ("/v1/completions", LONG),
            ("/v1/completions", {**LONG, "stream": True}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            response = await served.client.post(path, json=refused)
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("RateLimitError", "rate_limit_exceeded")
            assert "2 requests wait" in error["message"]
        # Only generation waits in the queue: the rest is served.
        assert (await served.client.post("/tokenize", json={"prompt": "a"})).status_code == 200
        assert (await served.client.get("/health")).status_code == 200
        admitted.pop().cancel()
        while (await served.engine.stats()).num_waiting > 1:
            await asyncio.sleep(0.005)
        admitted.append(asyncio.ensure_future(served.client.post("/v1/completions", json={**LONG, "max_tokens": 1})))
        served.hurry()
        assert [response.status_code for response in await asyncio.gather(*admitted)] == [200] * 3


async def test_a_burst_on_an_idle_engine_is_counted_before_the_engine_reports_it(model_path: Path) -> None:
    settings = ServerSettings(max_num_queued=3)
    async with serving(model_path, settings, executor="slow", max_num_seqs=8) as served:
        burst = [asyncio.ensure_future(served.client.post("/v1/completions", json=LONG)) for _ in range(20)]
        while sum(answer.done() for answer in burst) < 20 - 8 - 3:  # none ends: the rows are full, and three wait
            await asyncio.sleep(0.005)
        served.hurry()
        statuses = [answer.status_code for answer in await asyncio.gather(*burst)]
        assert statuses.count(200) + statuses.count(429) == 20
        assert 3 <= statuses.count(200) <= 8 + 3


async def test_one_request_of_many_prompts_leaves_the_door_open(model_path: Path) -> None:
    """Six of eight rows are its share: these the engine has got, and the parts that wait for their turns are one."""
    settings = ServerSettings(max_num_queued=8)
    async with serving(model_path, settings, executor="slow", max_num_seqs=8) as served:
        many = {"prompt": ["abc"] * 60, "max_tokens": 200}
        large = asyncio.ensure_future(served.client.post("/v1/completions", json=many))
        while (await served.engine.stats()).num_running < 6 or served.engine.num_pending < 6 + 1:
            await asyncio.sleep(0.005)
        assert served.engine.num_pending == 6 + 1
        answer = await served.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
        assert answer.status_code == 200, answer.text
        assert not large.done()
        large.cancel()
        await asyncio.gather(large, return_exceptions=True)
        await served.until_idle()
        assert served.engine.num_pending == 0


async def test_too_many_waiting_prompt_tokens_are_refused(model_path: Path) -> None:
    settings = ServerSettings(max_num_queued_tokens=40)
    async with serving(model_path, settings, executor="slow", max_num_seqs=1) as served:
        first = asyncio.ensure_future(served.client.post("/v1/completions", json=LONG))
        await served.until_running(1)
        while served.engine.num_queued_tokens:
            await asyncio.sleep(0.005)
        body = {"prompt": "a" * 30, "max_tokens": 1}
        waiting = [asyncio.ensure_future(served.client.post("/v1/completions", json=body)) for _ in range(2)]
        while served.engine.num_queued_tokens < 40:
            await asyncio.sleep(0.005)
        refused = await served.client.post("/v1/completions", json=body)
        assert refused.status_code == 429
        num_queued = served.engine.num_queued_tokens
        assert f"{num_queued} prompt tokens wait (limit 40)" in refused.json()["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        waiting.pop().cancel()
        while served.engine.num_queued_tokens >= 40:
            await asyncio.sleep(0.005)
        first.cancel()
        await asyncio.gather(first, *waiting, return_exceptions=True)
        await served.until_idle()
        assert served.engine.num_queued_tokens == 0
        assert (await served.client.post("/v1/completions", json=body)).status_code == 200


def test_the_time_to_try_again_follows_the_rate() -> None:
    clock = VirtualClock()
    backlog = Backlog(clock)
    assert backlog.seconds == math.inf
    for number in range(1000):  # 100 tokens a second for a long time
        backlog.add_request(f"r{number}", 10)
        clock.advance(0.1)
        backlog.note_progress([f"r{number}", "unknown"])
    backlog.add_request("a", 300)
    backlog.add_request("b", 200)
    assert backlog.num_tokens == 500
    assert backlog.seconds == pytest.approx(5.0, rel=0.02)
    assert backlog.discard("b") == 200
    assert backlog.seconds == pytest.approx(3.0, rel=0.02)
    clock.advance(RATE_SECONDS)
    assert backlog.seconds == pytest.approx(3.0 * math.e, rel=0.02), "nothing was computed meanwhile"


async def test_the_key_says_whose_request_it_is(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ServerSettings(api_key=["first", "second"])
    async with serving(model_path, settings) as served:
        clients = []
        send = served.engine._session.client.send

        def note(*messages: ClientMessage) -> None:
            clients.extend(message.request.client for message in messages if isinstance(message, AddRequest))
            send(*messages)

        monkeypatch.setattr(served.engine._session.client, "send", note)
        for key in ("first", "second", "first"):
            for stream in (False, True):
                answer = await served.client.post(
                    "/v1/completions",
                    json={"prompt": "=a", "max_tokens": 2, "stream": stream},
                    headers={"Authorization": f"Bearer {key}"},
                )
                assert answer.status_code == 200
        assert clients == ["key 0"] * 2 + ["key 1"] * 2 + ["key 0"] * 2


async def test_no_limit(model_path: Path) -> None:
    async with serving(model_path, ServerSettings(max_num_queued=None), max_num_seqs=1) as served:
        body = {"prompt": "abc", "max_tokens": 1}
        answers = await asyncio.gather(*[served.client.post("/v1/completions", json=body) for _ in range(20)])
        assert {answer.status_code for answer in answers} == {200}


async def test_draining_refuses_and_lets_the_running_ones_end(model_path: Path) -> None:
    async with serving(model_path, executor="slow") as served:
        running = asyncio.ensure_future(served.client.post("/v1/completions", json=LONG))
        await served.until_running(1)
        served.context.draining = True
        drained = asyncio.ensure_future(served.engine.drain(3600))
        assert (await served.client.get("/health")).status_code == 503
        assert (await served.client.get("/ping")).status_code == 503
        refused = await served.client.post("/v1/completions", json=LONG)
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        served.hurry()
        assert (await running).json()["usage"]["completion_tokens"] == 250
        assert await drained is True


async def test_a_drain_that_takes_too_long_aborts_with_a_finish_reason(model_path: Path) -> None:
    async with serving(model_path, executor="slow") as served:
        running = asyncio.ensure_future(served.client.post("/v1/completions", json=LONG))
        while not (await served.engine.stats()).generation_tokens_total:
            await asyncio.sleep(0.005)
        assert await served.engine.drain(0.05) is False
        [choice] = (await running).json()["choices"]
        assert choice["finish_reason"] == "abort"
        assert 0 < len(choice["text"]) < 250
