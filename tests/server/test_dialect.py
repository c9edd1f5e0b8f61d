"""Where OpenAI's API and vLLM's differ, the server follows the one that its settings name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from quire.errors import ConfigError
from quire.request import EngineRequest
from quire.server.settings import ServerSettings
from tests.server.conftest import Served, serving
from tests.server.sse import events

SETTINGS = ServerSettings(served_model_name=["tiny"], port=0, dialect="vllm")
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": {"messages": [CHAT["messages"]], "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
}


@pytest.fixture
async def vllm(model_path: Path) -> AsyncIterator[Served]:
    async with serving(model_path, SETTINGS, live=True) as served:
        yield served


def test_a_dialect_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="dialect must be one of openai, vllm") as caught:
        ServerSettings(dialect="ollama")
    assert caught.value.param == "dialect"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "reason"),
    [
        ("POST", "/v1/completions", {"prompt": "a", "temprature": 1}, 400, "unknown_parameter"),
        ("POST", "/v1/completions", {"prompt": "a", "temperature": -1}, 400, None),
        ("POST", "/v1/completions", {"prompt": "a", "model": "other"}, 404, "model_not_found"),
        ("GET", "/v1/responses/resp_1", None, 404, None),
        ("GET", "/nothing", None, 404, "unknown_url"),
        ("GET", "/v1/completions", None, 405, "method_not_allowed"),
    ],
)
async def test_the_code_of_an_error_is_its_status(
    vllm: Served, served: Served, method: str, path: str, body: object, status: int, reason: str | None
) -> None:
    """In OpenAI's dialect it is the word that is the reason in vLLM's."""
    answer = await vllm.client.request(method, path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error.pop("code"), error.pop("reason", None)) == (status, status, reason)
    theirs = (await served.client.request(method, path, json=body)).json()["error"]
    assert theirs == {**error, "code": reason}


async def test_errors_before_the_application_too(vllm: Served) -> None:
    """Of the site's guard, of bodies, and of HTTP itself."""
    foreign = await vllm.client.get("/v1/models", headers={"Host": "evil.example"})
    form = await vllm.client.post("/v1/completions", content=b"a=b", headers={"Content-Type": "text/plain"})
    host, port = vllm.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"NO HTTP\r\n\r\n")
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 400 ")
    found = [foreign.json()["error"], form.json()["error"], json.loads(body)["error"]]
    assert [(each["code"], each["reason"]) for each in found] == [
        (421, "host_not_allowed"),
        (415, "unsupported_media_type"),
        (400, "invalid_http"),
    ]


async def test_an_error_in_a_stream(model_path: Path) -> None:
    async with serving(model_path, SETTINGS, executor="nonfinite") as served:
        body = {"prompt": "abc?", "max_tokens": 9, "stream": True}
        error = events((await served.client.post("/v1/completions", json=body)).text)[-1]["error"]
        assert (error["code"], error["reason"]) == (500, "model_error")


async def test_official_clients_read_the_errors(vllm: Served) -> None:
    import anthropic

    async with openai.AsyncOpenAI(base_url=f"{vllm.url}/v1", api_key="k", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="other", prompt="a")
        assert (missing.value.type, missing.value.param) == ("NotFoundError", "model")
        assert isinstance(missing.value.body, dict)
        assert missing.value.body["code"] == 404
    async with anthropic.AsyncAnthropic(base_url=vllm.url, api_key="k", max_retries=0) as client:
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.messages.create(model="other", max_tokens=1, messages=[{"role": "user", "content": "a"}])
        assert unknown.value.body == {
            "error": {"type": "not_found_error", "message": unknown.value.body["error"]["message"]},  # type: ignore[index]
            "type": "error",
        }


@pytest.mark.parametrize("path", BODIES)
async def test_biases_beyond_100_are_100(
    vllm: Served, served: Served, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    seen: list[EngineRequest] = []
    process = vllm.engine.input_processor.process

    def watched(*args: Any, **keywords: Any) -> EngineRequest:
        seen.append(process(*args, **keywords))
        return seen[-1]

    monkeypatch.setattr(vllm.engine.input_processor, "process", watched)
    body = {**BODIES[path], "logit_bias": {"5": 500, "6": -1e300, "7": 99.5}}
    answer: httpx.Response = await vllm.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert seen[0].params.logit_bias == {5: 100.0, 6: -100.0, 7: 99.5}
    refused = await served.client.post(path, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logit_bias")
