"""Large requests are read in another process: the same answers and the same errors, and no conversation here."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from starlette.routing import Route

from quire.server import reading
from quire.server.protocol.response_items import Continuation
from quire.server.reading_helper import Ids
from tests.server.conftest import Served
from tests.server.raw import json_bodies_of
from tests.server.test_pooling import client_of, paths, references
from tests.test_llm_pooling import TEXTS as TEXTS_OF_MODELS

__all__ = ["paths", "references"]  # fixtures
USER = {"role": "user", "content": "hello"}
HISTORY = [USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}, "b"]}]
TOOL = {"name": "add", "parameters": {"type": "object"}}
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
Body = bytes | dict[str, Any]
CHATS: list[Body] = [
    {"messages": [USER]},
    {"messages": [*HISTORY, USER], "return_token_ids": True, "return_prompt_text": True, "prompt_logprobs": 1},
    {"messages": HISTORY, "continue_final_message": True, "add_generation_prompt": False, "echo": True},
    {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}]},
    {"messages": [USER, {"role": "assistant", "function_call": TOOL | {"arguments": "{}"}}, USER], "functions": [TOOL]},
    {"messages": [USER | {"foo": 1}, USER], "bar": {"a": 10**30}, "temperature": "0", "user": None},
    {"messages": [USER], "response_format": {"type": "json_object"}, "logprobs": True, "top_logprobs": 2},
    {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}},
    b"",
    b"[1]",
    b'{"messages": [{"role": "user", "content": "\xff"}]}',
    b"[" * 100_000,
    {"messages": []},
    {"messages": [USER, {"role": "usr", "content": "a"}]},
    {"messages": [USER, USER | {"content": [{"type": "text", "text": 1}]}]},
    {"messages": [USER, {"role": "user"}]},
    {"messages": [USER, USER], "temprature": 1},
    {"messages": [USER | {"role": "assistant", "content": ""}], "continue_final_message": True},
    {"messages": [USER, {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "a", "arguments": "{"}}]}]},
    {"messages": [USER | {"content": None, "role": "assistant", "tool_calls": [CALL]}], "model": "other"},
    {"messages": [USER], "chat_template": "{{ messages }}"},
    {"messages": [USER], "chat_template_kwargs": {"messages": 1}},
    {"messages": [USER], "max_tokens": 10**6},
]
TEXTS: list[Body] = [
    {"prompt": "hello \ud83d\ude00", "echo": True, "logprobs": 1},
    {"prompt": ["hello", "", "b"]},
    {"prompt": ["hello", "b"], "stream": True, "foo": 1},
    {"prompt": [65, 66, 67], "return_token_ids": True},
    {"prompt": [[65], [66, 67]], "n": 2, "echo": True},
    {"prompt": ["a", [1]]},
    {"prompt": [1, 10**6]},
    {"prompt": [2**31]},
    {"prompt": ["a"] * 1025},
    {"prompt": [1], "suffix": "a"},
    {"prompt": "a", "model": "other"},
    {},
]
TO_TOKENIZE: list[Body] = [
    {"prompt": "hello", "return_token_strs": True},
    {"prompt": ""},
    {"prompt": "hello", "add_special_tokens": False, "foo": 1},
    {"messages": [USER, *HISTORY], "tools": [{"type": "function", "function": TOOL}]},
    {"messages": HISTORY, "continue_final_message": True},
    {"messages": [USER], "prompt": "a"},
    {"messages": [USER], "continue_final_message": True},
]
USE = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]}
TO_CLAUDE: list[Body] = [
    {"messages": [USER], "system": "be brief", "metadata": {"user_id": "a"}},
    {"messages": [USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}]},
    {"messages": [USER, {"role": "assistant", "content": "12"}], "system": [{"type": "text", "text": "x"}]},
    {"messages": [USER], "stream": True, "stop_sequences": ["q"], "foo": 1},
    {"messages": [USER, {"role": "assistant", "content": [RESULT]}], "tool_choice": {"type": "tool"}},
    {"messages": [USER], "tools": [{"name": "add", "input_schema": {}}], "tool_choice": {"type": "tool"}},
    {"messages": [USER], "thinking": {"type": "enabled", "budget_tokens": 1}},
    {"messages": [USER, {"role": "user", "content": [{"type": "image"}]}]},
    {"messages": [USER, {"role": "assistant", "content": [RESULT]}], "model": "other"},
    {"messages": []},
    {"messages": [USER], "top_p": 9},
]
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "2"}
ITEMS = [USER, {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}, OUTPUT]
TO_RESPONSES: list[Body] = [
    {"input": "hello", "instructions": "be brief"},
    {"input": ITEMS, "metadata": {"a": "b"}},
    {"input": [USER, {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]}, USER], "stream": True},
    {"input": [USER], "store": False, "foo": 1},
    {"input": [USER], "previous_response_id": "resp_none"},
    {"input": [{"type": "item_reference", "id": "msg_none_in0"}]},
    {"input": [USER, {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{"}]},
    {"input": [USER, {"role": "user", "content": [{"type": "reasoning", "text": "a"}]}], "model": "other"},
    {"input": [USER, {"role": "user", "content": [{"type": "reasoning", "text": "a"}]}]},
    {"input": [USER], "tool_choice": "required"},
    {"input": []},
    {"input": "a", "top_p": 9},
]
TO_BATCHES: list[Body] = [
    {"messages": [[USER], [USER, *HISTORY, USER]], "logprobs": True, "bar": 1},
    {"messages": [HISTORY, HISTORY], "continue_final_message": True, "add_generation_prompt": False, "echo": True},
    {"messages": [[USER], [USER | {"foo": 1}]], "stream": True},
    {"messages": [[USER], [USER | {"role": "usr"}]]},
    {"messages": [[USER], []]},
    {"messages": [USER]},
    {"messages": [[USER], [USER]], "n": 2},
]
TO_DETOKENIZE: list[Body] = [
    {"tokens": [65, 66]},
    {"tokens": [], "foo": 1},
    {"tokens": [65, -1]},
    {"tokens": [10**6]},
    {"tokens": "a"},
    {},
]
ROUTES: dict[str, tuple[list[Body], dict[str, Any]]] = {
    "/v1/chat/completions": (CHATS, {"max_tokens": 4, "temperature": 0}),
    "/v1/completions": (TEXTS, {"max_tokens": 4, "temperature": 0}),
    "/v1/chat/completions/batch": (TO_BATCHES, {"max_tokens": 4, "temperature": 0}),
    "/tokenize": (TO_TOKENIZE, {}),
    "/detokenize": (TO_DETOKENIZE, {}),
    "/v1/messages": (TO_CLAUDE, {"model": "tiny", "max_tokens": 4, "temperature": 0}),
    "/v1/messages/count_tokens": (TO_CLAUDE[:3], {"model": "tiny"}),
    "/v1/responses": (TO_RESPONSES, {"max_output_tokens": 4, "temperature": 0}),
    "/v1/responses/input_tokens": (TO_RESPONSES[:3], {}),
}
FEW: list[Body] = [
    {"input": TEXTS_OF_MODELS},
    {"input": [3, 4]},
    {"input": [[3], [4, 5]], "foo": 1},
    {"input": [[]]},
    {},
]
PAIRS: list[Body] = [
    {"text_1": "w2", "text_2": TEXTS_OF_MODELS},
    {"queries": TEXTS_OF_MODELS, "documents": TEXTS_OF_MODELS, "foo": 1},
    {"data_1": ["w2"], "data_2": "w3"},
    {"text_1": ["w2", "w3"], "text_2": ["w2"]},
    {"text_1": "w2", "text_2": []},
    {"text_1": "w2"},
]
RANKED: list[Body] = [
    {"query": "w2", "documents": TEXTS_OF_MODELS, "top_n": 2},
    {"query": "w2", "documents": TEXTS_OF_MODELS, "return_documents": False, "foo": 1},
    {"query": "w2", "documents": [1]},
    {"query": "w2", "documents": "w3"},
]
TO_COHERE: list[Body] = [{"texts": TEXTS_OF_MODELS, "foo": 1}, {"texts": []}, {"texts": ["w2"], "truncate": "START"}]
POOLED: dict[str, dict[str, list[Body]]] = {
    "embedder": {"/v1/embeddings": FEW, "/pooling": FEW, "/v2/embed": TO_COHERE},
    "classifier": {"/classify": FEW},
    "reranker": {"/score": PAIRS, "/rerank": RANKED},
}
"""Model -> its routes."""
MOMENTS = ("created", "created_at", "completed_at", "usage", "id", "item_id")
"""Fields that differ from one answer to the next. A repeated prompt is found in the prefix cache."""


async def ask(served: Served, path: str, body: Body) -> tuple[int, str | None, Any]:
    """`answer_of` with the fields that all bodies of a route have."""
    content = body if isinstance(body, bytes) else json.dumps(ROUTES[path][1] | body).encode()
    return await answer_of(served.client, path, content)


async def answer_of(client: httpx.AsyncClient, path: str, content: bytes) -> tuple[int, str | None, Any]:
    """(status, ignored fields, answer but for what differs from one to the next)"""
    headers = {"Content-Type": "application/json", "X-Request-Id": "same"}
    answer = await client.post(path, content=content, headers=headers)
    lines = [line[6:] for line in answer.text.split("\n") if line.startswith("data: {")]
    parts = [_lasting(json.loads(line)) for line in lines or [answer.text]]
    return answer.status_code, answer.headers.get("x-quire-ignored"), parts


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _lasting(each) for name, each in value.items() if name not in MOMENTS}
    return [_lasting(each) for each in value] if isinstance(value, list) else value


async def test_answers_and_errors_are_those_of_small_bodies(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [(path, body) for path, (bodies, _) in ROUTES.items() for body in bodies]
    expected = [await ask(served, path, body) for path, body in asked]
    assert {path for (path, _), (status, _, _) in zip(asked, expected, strict=True) if status == 200} == {*ROUTES}
    monkeypatch.setattr(reading, "LONG_BODY_BYTES", -1)
    parsed: list[Any] = []

    def recorded(body: bytes, type: Any) -> Any:
        parsed.append(msgspec.json.decode(body, type=type))
        return parsed[-1]

    decoding = SimpleNamespace(json=SimpleNamespace(decode=recorded, encode=msgspec.json.encode))
    monkeypatch.setattr(reading, "msgspec", SimpleNamespace(**vars(msgspec) | vars(decoding)))
    for (path, body), before in zip(asked, expected, strict=True):
        assert await ask(served, path, body) == before, (path, body)
    assert len(parsed) >= sum(status == 200 for status, _, _ in expected)
    for request in parsed:
        messages = getattr(request, "messages", None) or [[0]]
        assert all(len(each) == 1 for each in (messages if isinstance(messages[0], list) else [messages]))
        assert all(getattr(request, name, None) in (None, "") for name in ("input", "system"))
        for name in ("prompt", "tokens"):
            value = getattr(request, name, None)
            assert value == [0] or Ids.of(name, value) is None, "ids are packed"


@pytest.mark.parametrize("model", POOLED)
async def test_answers_of_models_that_pool_are_those_of_small_bodies(
    paths: dict[str, Path], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_of(paths[model]) as client:
        asked = [(path, json.dumps(body).encode()) for path, bodies in POOLED[model].items() for body in bodies]
        expected = [await answer_of(client, *each) for each in asked]
        statuses = {(path, status) for (path, _), (status, _, _) in zip(asked, expected, strict=True)}
        assert statuses == {(path, status) for path in POOLED[model] for status in (200, 400)}
        monkeypatch.setattr(reading, "LONG_BODY_BYTES", -1)
        for (path, body), before in zip(asked, expected, strict=True):
            assert await answer_of(client, path, body) == before, (path, body)


async def test_every_route_reads_large_bodies_in_another_process(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the system bounds their processor time."""
    monkeypatch.setattr(reading, "LONG_BODY_BYTES", -1)
    texts, app = served.engine.texts.helpers, served.app
    assert texts is not None
    assert app is not None
    readers: list[str] = []
    read = texts.read

    def recorded(reader: str, argument: str, content: Sequence[bytes]) -> bytes | bytearray:
        readers.append(reader)
        return read(reader, argument, content)

    monkeypatch.setattr(texts, "read", recorded)
    posts = {each.path for each in app.routes if isinstance(each, Route) and "POST" in (each.methods or ())}
    with_body = set()
    for path in sorted(posts):
        number = len(readers)
        status, _, answer = await answer_of(served.client, path.replace("{response_id}", "resp_a"), b"[1]")
        if status == 400 and "must be a JSON object" in json.dumps(answer):
            with_body.add(path)
            assert len(readers) == number + 1, path
    assert {*ROUTES, "/v1/embeddings", "/pooling", "/classify", "/score", "/rerank", "/v2/embed"} < with_body


async def test_items_of_a_large_response_are_stored_as_those_of_a_small_one(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stored(request_id: str) -> tuple[Any, Any]:
        headers = {"X-Request-Id": request_id}
        given = {"input": ITEMS, "max_output_tokens": 4, "temperature": 0}
        first = (await served.client.post("/v1/responses", json=given, headers=headers)).json()
        items = (await served.client.get(f"/v1/responses/{first['id']}/input_items")).json()["data"]
        more = {"input": "and?", "previous_response_id": first["id"], "max_output_tokens": 4, "temperature": 0}
        again = more | {"input": [{"type": "item_reference", "id": each["id"]} for each in reversed(items)]}
        again["previous_response_id"] = None
        repeated = (await served.client.post("/v1/responses", json=again)).json()
        assert repeated["output"][0]["content"] == first["output"][0]["content"]
        after = (await served.client.post("/v1/responses", json=more)).json()
        assert "output" in after, after
        name = first["id"].removeprefix("resp_")
        return [item | {"id": item["id"].replace(name, "")} for item in items], after["output"][0]["content"]

    expected = await stored('a"\\')
    assert [item["id"] for item in expected[0]] == ["fco__in2", "fc__in1", "msg__in0"]
    monkeypatch.setattr(reading, "LONG_BODY_BYTES", -1)
    monkeypatch.setattr(reading, "parse_body", None)  # of this process
    monkeypatch.setattr(Continuation, "join", None)
    assert await stored('b"\\') == expected


@pytest.mark.long
async def test_a_process_that_is_killed_fails_its_request_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "LONG_BODY_BYTES", -1)
    path = "/v1/chat/completions"
    expected = await ask(served, path, CHATS[0])
    assert expected[0] == 200
    helpers = served.engine.texts.helpers
    assert helpers is not None
    (pid,) = helpers.pids
    os.kill(pid, signal.SIGSTOP)
    asking = asyncio.ensure_future(ask(served, path, CHATS[0]))
    await _until(lambda: bool(helpers._working))
    os.kill(pid, signal.SIGKILL)
    assert (await asking)[0] == 500
    assert await ask(served, path, CHATS[0]) == expected
    (pid,) = helpers.pids
    os.kill(pid, signal.SIGKILL)
    await _until(lambda: not helpers._idle[0].is_alive)
    assert await ask(served, path, CHATS[0]) == expected, "one that ended while idle is replaced"


async def test_a_client_that_hangs_up_is_not_waited_for_and_its_body_counts_until_then(
    live: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that stand still, and a third body that waits for one of them."""
    texts, app = live.engine.texts.helpers, live.app
    assert texts is not None
    assert app is not None
    body = json.dumps({"prompt": "a"}).encode() + b" " * 200_000
    post = {"content": body, "headers": {"Content-Type": "application/json"}}
    monkeypatch.setattr(reading, "LONG_BODY_BYTES", 100_000)
    await asyncio.gather(*(live.client.post("/tokenize", **post) for _ in range(2)))
    pids = texts.pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    bodies = json_bodies_of(app)
    try:
        asking = [asyncio.ensure_future(live.client.post("/tokenize", **post)) for _ in range(3)]
        await _until(lambda: bodies.num_bytes > 3 * 100_000)
        for task in asking:
            task.cancel()
        await _until(lambda: bodies.num_bytes == 0)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert (await live.client.post("/tokenize", **post)).status_code == 200
    assert set(texts.pids) <= set(pids), "no process was ended"


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.005)
