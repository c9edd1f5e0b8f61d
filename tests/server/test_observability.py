"""The log of requests, times in answers, and the load in a header."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.kv_cache.stats import EngineStats
from quire.logging import REQUEST_ID, JsonFormatter, get_logger, set_log_format, tell
from quire.server import request_log
from quire.server.settings import ServerSettings
from tests.server.conftest import Served, serving
from tests.server.sse import chunks

TIMES = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[dict[str, Any]] = []
        self.setFormatter(JsonFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))


@pytest.fixture
def records() -> Iterator[Records]:
    handler = Records()
    level = request_log.logger.level
    request_log.logger.addHandler(handler)
    yield handler
    request_log.logger.removeHandler(handler)
    request_log.logger.setLevel(level)


async def test_requests_are_logged(model_path: Path, records: Records) -> None:
    settings = ServerSettings(served_model_name=["tiny"], enable_log_requests=True)
    async with serving(model_path, settings) as served:
        body = {"prompt": "=secret", "temperature": 0.5, "n": 2}
        answer = (await served.client.post("/v1/completions", json=body)).json()
    received, finished = records.lines
    assert received["request_id"] == finished["request_id"] == answer["id"]
    assert (received["level"], received["event"]) == ("INFO", "received")
    assert (received["prompt_tokens"], received["params"]) == (8, {"n": 2, "temperature": 0.5})
    assert (finished["event"], finished["finish_reasons"], finished["generation_tokens"]) == ("finished", ["stop"], 14)
    assert {"queue_seconds", "prefill_seconds", "decode_seconds", "cached_tokens"} <= set(finished)
    assert "secret" not in json.dumps(records.lines), "what a client wrote is not logged"


async def test_prompts_are_logged_when_debugging(model_path: Path, records: Records) -> None:
    request_log.logger.setLevel(logging.DEBUG)
    settings = ServerSettings(enable_log_requests=True, max_log_len=3)
    async with serving(model_path, settings) as served:
        await served.client.post("/v1/completions", json={"prompt": "=secret"})
    [prompt] = [line for line in records.lines if line["event"] == "prompt"]
    assert (prompt["prompt"], len(prompt["prompt_token_ids"])) == ("=se", 3)


async def test_nothing_is_logged_unless_asked_for(served: Served, records: Records) -> None:
    await served.client.post("/v1/completions", json={"prompt": "=ab"})
    assert records.lines == []


def test_a_record_as_json() -> None:
    records = Records()
    logger = get_logger("quire.test")
    logger.addHandler(records)
    token = REQUEST_ID.set("cmpl-1")
    try:
        try:
            raise ValueError('"quoted"\n\u2028')
        except ValueError:
            logger.error("failed\nwith %s", "ü", exc_info=True, extra={"fields": {"code": 7}})
        REQUEST_ID.set(None)
        logger.error("%s", object)
    finally:
        REQUEST_ID.reset(token)
        logger.removeHandler(records)
    first, second = records.lines
    assert (first["message"], first["level"], first["logger"]) == ("failed\nwith ü", "ERROR", "quire.test")
    assert (first["request_id"], first["code"]) == ("cmpl-1", 7)
    assert "ValueError" in first["exception"]
    assert "request_id" not in second
    assert first["time"].endswith("Z")


def test_what_a_command_says(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_LOG_FORMAT", "text")
    tell("shutting down")
    assert capsys.readouterr().err == "quire: shutting down\n"
    set_log_format("json")
    tell("shutting down")
    line = json.loads(capsys.readouterr().err)
    assert (line["message"], line["level"]) == ("shutting down", "INFO")
    set_log_format("text")


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
async def test_times_of_a_request(model_path: Path, route: str) -> None:
    settings = ServerSettings(served_model_name=["tiny"], enable_per_request_metrics=True)
    prompt: dict[str, Any] = {"prompt": "abc"} if route == "/v1/completions" else {"messages": [MESSAGE]}
    async with serving(model_path, settings) as served:

        async def ask(**fields: Any) -> Any:
            return (await served.client.post(route, json={**prompt, "max_tokens": 5, **fields})).json()

        times = (await ask(include_metrics=True))["metrics"]
        assert set(times) == TIMES
        assert all(value >= 0 for value in times.values())
        assert times["mean_itl_ms"] == pytest.approx(times["generation_time_ms"] / 4)
        computing = times["time_to_first_token_ms"] + times["generation_time_ms"]
        assert times["tokens_per_second"] == pytest.approx(5000 / computing)
        assert set((await ask(include_metrics=True, max_tokens=1))["metrics"]) == TIMES - {"mean_itl_ms"}
        assert (await ask(include_metrics=True, n=2))["metrics"] is None
        assert set((await ask())["metrics"]) == TIMES
        assert (await ask(include_metrics=False)).get("metrics") is None
        stream = {"stream": True, "stream_options": {"include_usage": True}, "include_metrics": True}
        text = (await served.client.post(route, json={**prompt, "max_tokens": 5, **stream})).text
        events = chunks(text)
        assert [bool(event.get("metrics")) for event in events] == [False] * (len(events) - 1) + [True]
        assert set(events[-1]["metrics"]) == TIMES


MESSAGE = {"role": "user", "content": "abc"}


async def test_times_need_the_setting(served: Served) -> None:
    response = await served.client.post("/v1/completions", json={"prompt": "abc", "include_metrics": True})
    assert response.json().get("metrics") is None
    assert response.headers["x-quire-ignored"] == "include_metrics"
    plain = await served.client.post("/v1/completions", json={"prompt": "abc"})
    assert "x-quire-ignored" not in plain.headers


async def test_times_of_several_prompts(model_path: Path) -> None:
    async with serving(model_path, ServerSettings(enable_per_request_metrics=True)) as served:
        body = {"prompt": ["a", "b"], "max_tokens": 2, "include_metrics": True}
        assert (await served.client.post("/v1/completions", json=body)).json()["metrics"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_load_in_a_header(served: Served, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def header(form: str, path: str = "/v1/completions", prompt: str = "=a") -> str | None:
        asks = {"endpoint-load-metrics-format": form}
        served.context.metrics.stats = EngineStats(num_blocks=8, num_used_blocks=2, num_waiting=3)
        monkeypatch.setattr(served.context.metrics, "record_stats", lambda stats: None)
        response = await served.client.post(path, json={"prompt": prompt, "stream": stream}, headers=asks)
        return response.headers.get("endpoint-load-metrics")

    assert await header("JSON") == (
        'JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}}'
    )
    text = "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0"
    assert await header("TEXT") == await header("text") == text
    assert await header("protobuf") is None
    assert await header("TEXT", prompt="") is None, "only of requests that were served"
    plain = await served.client.post("/v1/completions", json={"prompt": "=a"})
    assert "endpoint-load-metrics" not in plain.headers
