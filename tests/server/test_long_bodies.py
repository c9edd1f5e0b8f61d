"""Large chat requests are read in another process: the same answers and the same errors, and no parsed message here."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from quire.server import body as body_module
from quire.server import long_bodies
from quire.server.protocol.chat import ChatRequest
from tests.server.conftest import Served

USER = {"role": "user", "content": "hello"}
HISTORY = [USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}, "b"]}]
TOOL = {"name": "add", "parameters": {"type": "object"}}
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
BODIES: list[bytes | dict[str, Any]] = [
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


async def ask(served: Served, body: bytes | dict[str, Any]) -> tuple[int, str | None, Any]:
    """(status, ignored fields, answer but for what differs from one to the next)"""
    content = body if isinstance(body, bytes) else json.dumps({"max_tokens": 4, "temperature": 0, **body}).encode()
    headers = {"Content-Type": "application/json", "X-Request-Id": "same"}
    answer = await served.client.post("/v1/chat/completions", content=content, headers=headers)
    text = answer.text
    if text.startswith("data: "):
        parts = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    else:
        parts = [json.loads(text)]
    for part in parts:
        part.pop("created", None)
        part.pop("usage", None)  # the second request finds the prompt in the prefix cache
    return answer.status_code, answer.headers.get("x-quire-ignored"), parts


async def test_answers_and_errors_are_those_of_small_bodies(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [await ask(served, body) for body in BODIES]
    assert {200, 400, 404} == {status for status, _, _ in expected}

    monkeypatch.setattr(long_bodies, "LONG_BODY_BYTES", -1)
    parsed: list[ChatRequest] = []
    parse = body_module.parse_body

    def recorded(body: bytes, kind: Any, *, strict: bool = False) -> Any:
        result = parse(body, kind, strict=strict)
        parsed.append(result[0])
        return result

    monkeypatch.setattr(long_bodies, "parse_body", recorded)
    for body, before in zip(BODIES, expected, strict=True):
        assert await ask(served, body) == before, body
    assert len(parsed) >= sum(status == 200 for status, _, _ in expected)
    assert {len(request.messages) for request in parsed} == {1}


async def test_a_process_that_is_killed_fails_its_request_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_bodies, "LONG_BODY_BYTES", -1)
    expected = await ask(served, {"messages": [USER]})
    assert expected[0] == 200
    texts = served.engine.long_texts
    assert texts is not None
    (pid,) = texts.pids
    os.kill(pid, signal.SIGKILL)
    assert (await ask(served, {"messages": [USER]}))[0] == 500
    assert await ask(served, {"messages": [USER]}) == expected
