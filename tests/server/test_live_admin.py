"""What the live page asks for besides frames: samples of 15 minutes, and for an admin's key aborts and the log."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest

from quire.clock import VirtualClock
from quire.dashboard.trail import INTERVAL_SECONDS, SECONDS, Trail
from quire.kv_cache.stats import EngineStats
from quire.server.live_admin import KEPT, MAX_CHARACTERS, LogTail
from quire.server.settings import ServerSettings
from tests.server.conftest import Served, serving

ADMIN = {"Authorization": "Bearer root"}
KEYS = ServerSettings(admin_api_key=["root"], api_key=["user"])
LONG = {"prompt": "abc", "max_tokens": 200}


async def live_id(served: Served) -> str:
    await served.until_running(1)
    frame = (await served.client.get("/debug/kv", headers=ADMIN)).json()
    found: str = frame["kv"]["requests"][0]["request_id"]
    return found


async def test_an_admins_key_ends_a_request(model_path: Path) -> None:
    async with serving(model_path, KEYS, executor="slow") as served:
        post = served.client.post
        answer = asyncio.ensure_future(post("/v1/completions", json=LONG, headers={"Authorization": "Bearer user"}))
        name = await live_id(served)
        for key, status in (("user", 403), ("wrong", 401)):
            refused = await post("/debug/abort", json={"request_id": name}, headers={"Authorization": f"Bearer {key}"})
            assert refused.status_code == status
        assert (await post("/debug/abort", json={"request_id": "cmpl-none#1"}, headers=ADMIN)).status_code == 404
        assert not answer.done()
        ended = await post("/debug/abort", json={"request_id": name}, headers=ADMIN)
        assert (ended.status_code, ended.content) == (200, b"")
        assert (await answer).json()["choices"][0]["finish_reason"] == "abort"
        frame = (await served.client.get("/debug/kv", headers=ADMIN)).json()
        assert frame["outcomes"] == {"abort": 1}
        assert (frame["num_client_errors"], frame["num_server_errors"]) == (3, 0)
        await served.until_idle()


@pytest.mark.parametrize("path", ["/debug/abort", "/debug/log"])
async def test_without_admins_keys_even_this_machine_is_refused(served: Served, path: str) -> None:
    method = "POST" if path == "/debug/abort" else "GET"
    refused = await served.client.request(method, path, json={"request_id": "a"} if method == "POST" else None)
    assert refused.status_code == 404
    assert "--admin-api-key" in refused.json()["error"]["message"]


async def test_the_log_of_an_admin(model_path: Path) -> None:
    async with serving(model_path, KEYS) as served:
        logging.getLogger("quire.test").warning("hello %s", "<b>")
        kept = (await served.client.get("/debug/log", headers=ADMIN)).json()
        lines = kept["lines"]
        line = next(each for each in lines if each["logger"] == "quire.test")
        assert (line["level"], line["message"], line["request_id"]) == ("WARNING", "hello <b>", None)
        later = await served.client.get(f"/debug/log?after={lines[-1]['number']}", headers=ADMIN)
        assert later.json() == {"lines": [], "process": kept["process"]}
        place = f"after={lines[-1]['number']}&process="
        same, restarted = [
            (await served.client.get(f"/debug/log?{place}{process}", headers=ADMIN)).json()
            for process in (kept["process"], "another")
        ]
        assert same["lines"] == []
        assert restarted["lines"][: len(lines)] == lines, "numbers of another process say nothing about this one's"
        assert (await served.client.get("/debug/log?after=-1", headers=ADMIN)).status_code == 400
        assert (await served.client.get("/debug/log", headers={"Authorization": "Bearer user"})).status_code == 403
        *_, tail = (each for each in logging.getLogger("quire").handlers if isinstance(each, LogTail))
        served.context.exit()
        assert tail not in logging.getLogger("quire").handlers


def test_the_log_is_bounded() -> None:
    tail = LogTail()
    for number in range(KEPT + 10):
        tail.handle(logging.makeLogRecord({"msg": f"{number} " + "x" * 9999, "levelname": "INFO"}))
    lines = tail.lines()
    assert [lines[0].number, lines[-1].number, len(lines)] == [11, KEPT + 10, KEPT]
    assert {len(line.message) for line in lines} == {MAX_CHARACTERS}
    tail.handle(logging.makeLogRecord({"msg": "%d", "args": ("no number",)}))
    assert tail.lines(KEPT + 10)[0].message == "%d"


@pytest.mark.parametrize(("headers", "is_admin"), [(ADMIN, True), ({"Authorization": "Bearer user"}, False)])
async def test_the_history(model_path: Path, headers: dict[str, str], is_admin: bool) -> None:
    async with serving(model_path, KEYS) as served:
        await served.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 7}, headers=headers)
        history = (await served.client.get("/debug/kv/history", headers=headers)).json()
        assert history["is_admin"] is is_admin
        newest = history["samples"][-1]
        assert (newest["generation_tokens_total"], newest["num_first_tokens"], newest["num_running"]) == (7, 1, 0)


async def test_an_admin_of_a_server_that_asks_for_no_key(model_path: Path) -> None:
    async with serving(model_path, ServerSettings(admin_api_key=["root"])) as served:
        for headers, is_admin in ((ADMIN, True), ({}, False), ({"Authorization": "Bearer wrong"}, False)):
            answer = await served.client.get("/debug/kv/history", headers=headers)
            assert answer.json()["is_admin"] is is_admin


class TestTrail:
    def made(self) -> tuple[Trail, VirtualClock]:
        clock = VirtualClock(100.0)
        return Trail(lambda: (0.0, 0), clock), clock

    def test_samples_are_apart_and_the_last_is_of_now(self) -> None:
        trail, clock = self.made()
        assert trail.samples() == []
        for tokens in range(81):
            trail.record_stats(EngineStats(generation_tokens_total=tokens, num_running=1))
            clock.advance(0.125)
        found = [(sample.seconds, sample.generation_tokens_total) for sample in trail.samples()]
        assert found == [(10.125, 0), (5.125, 40), (0.125, 80), (0.0, 80)]

    def test_an_idle_time_is_flat(self) -> None:
        """The tokens before it do not count for the time after it."""
        trail, clock = self.made()
        trail.record_stats(EngineStats(generation_tokens_total=1, num_running=1))
        clock.advance(2)
        trail.record_stats(EngineStats(generation_tokens_total=50))
        clock.advance(300)
        trail.record_stats(EngineStats(generation_tokens_total=51, num_running=1))
        found = [(sample.seconds, sample.generation_tokens_total) for sample in trail.samples()]
        assert found == [(302.0, 1), (300.0, 50), (0.0, 51), (0.0, 51)]

    def test_15_minutes_are_kept(self) -> None:
        trail, clock = self.made()
        for step in range(2000):
            trail.record_stats(EngineStats(steps_total=step, num_running=step % 2))
            clock.advance(1.0)
        samples = trail.samples()
        assert SECONDS - INTERVAL_SECONDS - 1 <= samples[0].seconds <= SECONDS
        assert len(samples) <= 2 * SECONDS / INTERVAL_SECONDS + 2
        assert len(msgspec.json.encode(samples)) < 100_000
