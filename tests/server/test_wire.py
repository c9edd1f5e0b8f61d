"""What clients of vLLM and OpenAI rely on besides the fields: limits, ids, query parameters, ends of streams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from quire.server.settings import ServerSettings
from tests.server.conftest import Served, serving
from tests.server.model_directory import MAX_MODEL_LEN
from tests.server.sse import chunks, events

HI = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY: dict[str, dict[str, Any]] = {CHAT: {"messages": HI}, COMPLETIONS: {"prompt": "hello"}}


@pytest.mark.parametrize(
    ("path", "name"), [(COMPLETIONS, "max_tokens"), (CHAT, "max_tokens"), (CHAT, "max_completion_tokens")]
)
async def test_max_tokens_that_do_not_fit(served: Served, path: str, name: str) -> None:
    fits = await served.client.post(path, json={**BODY[path], name: 1})
    room = MAX_MODEL_LEN - fits.json()["usage"]["prompt_tokens"]
    assert (await served.client.post(path, json={**BODY[path], name: room, "ignore_eos": True})).status_code == 200
    for stream in (False, True):
        response = await served.client.post(path, json={**BODY[path], name: room + 1, "stream": stream})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (name, "context_length_exceeded")
        assert f"{MAX_MODEL_LEN - room} prompt tokens + {room + 1} ({name}) = {MAX_MODEL_LEN + 1}" in error["message"]


async def test_max_completion_tokens_counts(served: Served) -> None:
    body = {"messages": HI, "max_tokens": 5, "max_completion_tokens": 2}
    assert (await served.client.post(CHAT, json=body)).json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_request_id_of_the_header(served: Served, path: str) -> None:
    body = {**BODY[path], "max_tokens": 2, "request_id": "body"}
    response = await served.client.post(path, json=body, headers={"X-Request-Id": "mine"})
    assert response.json()["id"].split("-", 1)[1] == "mine"
    assert response.headers["x-request-id"] == response.json()["id"]
    for bad in ("", "two words", "x" * 129):
        refused = await served.client.post(path, json=body, headers={"X-Request-Id": bad})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Request-Id")


async def test_a_request_id_of_the_header_may_be_in_use(live: Served) -> None:
    """A proxy tries again under the same id; a body's own id stays the client's matter."""
    body = {"prompt": "hello", "max_tokens": 100, "ignore_eos": True, "stream": True}
    headers = {"X-Request-Id": "mine"}
    async with live.client.stream("POST", COMPLETIONS, json=body, headers=headers) as first:
        lines = first.aiter_lines()
        await anext(lines)
        second = await live.client.post(COMPLETIONS, json={"prompt": "hello", "max_tokens": 1}, headers=headers)
        assert (second.status_code, second.json()["id"]) == (200, "cmpl-mine")


@pytest.fixture
async def with_ids(model_path: Path) -> AsyncIterator[Served]:
    async with serving(model_path, ServerSettings(enable_request_id_headers=True)) as served:
        yield served


async def test_request_ids_are_returned_when_asked_for(with_ids: Served) -> None:
    body = {**BODY[CHAT], "max_tokens": 1}
    given = await with_ids.client.post(CHAT, json=body, headers={"X-Request-Id": "mine"})
    assert (given.headers.get_list("x-request-id"), given.json()["id"]) == (["mine"], "chatcmpl-mine")
    assert (await with_ids.client.post(CHAT, json={}, headers={"X-Request-Id": "mine"})).headers[
        "x-request-id"
    ] == "mine"
    first, second = [(await with_ids.client.get("/health")).headers["x-request-id"] for _ in range(2)]
    assert first != second
    assert (await with_ids.client.get("/health", headers={"X-Request-Id": "x" * 200})).headers[
        "x-request-id"
    ] != "x" * 200


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/models/tiny", "/debug/kv", "/metrics", "/"])
async def test_query_parameters_that_a_route_does_not_know(served: Served, path: str) -> None:
    response = await served.client.get(f"{path}?api-version=2026-01-01&beta=true")
    assert response.status_code == 200
    response = await served.client.get(f"{path}?tags=weights")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tags"


async def test_query_parameters_of_the_live_view(live: Served) -> None:
    async with live.client.stream("GET", "/debug/kv/events?rate=10") as response:
        assert response.status_code == 200
    assert (await live.client.get("/debug/kv/events?rates=10")).json()["error"]["param"] == "rates"


async def test_query_parameters_of_a_body_route(served: Served) -> None:
    response = await served.client.post(f"{CHAT}?stream=true", json=BODY[CHAT])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream")


async def test_a_role_is_no_token(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": HI, "max_tokens": 3, "n": 2, "stream": True, "stream_options": options}
    found = chunks((await served.client.post(CHAT, json=body)).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in found[:2]] == [0, 0]
    assert found[-1]["usage"]["completion_tokens"] == 6
    assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in found)


async def test_an_error_ends_a_stream(model_path: Path) -> None:
    async with serving(model_path, executor="nonfinite") as served:
        for path, body in (
            (CHAT, {"messages": [{"role": "user", "content": "abc?"}]}),
            (COMPLETIONS, {"prompt": "abc?"}),
        ):
            response = await served.client.post(path, json={**body, "max_tokens": 9, "stream": True})
            found = events(response.text)
            assert found[-1]["error"]["code"] == "model_error"
            assert "[DONE]" not in found


@pytest.mark.parametrize("num_logprobs", [None, 1])
async def test_echo_of_token_ids_keeps_special_tokens(served: Served, num_logprobs: int | None) -> None:
    body = {
        "prompt": [256, 64, 257, 65],
        "echo": True,
        "max_tokens": 2,
        "logprobs": num_logprobs,
        "logit_bias": {"66": 100},
    }
    [choice] = (await served.client.post(COMPLETIONS, json=body)).json()["choices"]
    assert choice["text"].startswith("<|start|>a<|end|>b")
    assert len(choice["text"]) == 20
    if num_logprobs:
        assert choice["logprobs"]["text_offset"] == [0, 9, 10, 17, 18, 19]
    plain = await served.client.post(COMPLETIONS, json={**body, "prompt": "ab"})
    assert plain.json()["choices"][0]["text"].startswith("ab")


async def test_alternatives_of_none(served: Served) -> None:
    """openai-python and others send the default."""
    response = await served.client.post(CHAT, json={"messages": HI, "max_tokens": 1, "top_logprobs": 0})
    assert response.status_code == 200
    response = await served.client.post(CHAT, json={"messages": HI, "max_tokens": 1, "stream_options": {}})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([{"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "4"}]}], "tool: 4"),
        ([{"role": "assistant", "content": None}], "assistant: "),
        ([{"role": "user", "content": ["a", {"type": "input_text", "text": "b"}]}], "user: a\nb"),
    ],
)
async def test_messages_reach_the_template(served: Served, messages: list[dict[str, Any]], text: str) -> None:
    body = {"messages": [*messages, *HI], "add_generation_prompt": False}
    tokens = (await served.client.post("/tokenize", json=body)).json()["tokens"]
    prompt = served.context.tokenizer.decode(tokens, skip_special_tokens=False)
    assert prompt == f"<|start|>{text}<|end|><|start|>user: hi<|end|>"


async def test_arguments_that_are_no_json(served: Served) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    response = await served.client.post(CHAT, json={"messages": [*HI, message]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"
