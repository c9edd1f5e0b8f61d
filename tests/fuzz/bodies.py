"""Bodies of POST requests: what once did harm, and mutations of what is valid.

A server over the fake executor, called directly. Whatever is sent: an answer or an OpenAI error with a documented
status, never a 500; an error of at most `ERROR_BYTES`, an answer of at most twice what an answer may weigh; and when it
is there, nothing of the request is left in the engine.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.server.answer_size import MAX_ANSWER_BYTES
from quire.server.errors import MESSAGES_PATH
from quire.server.openapi import api_description
from tests.fuzz.harness import Attack, Fuzzer
from tests.server.conftest import Served, serving
from tests.server.model_directory import write_model

ERROR_BYTES = 8_000

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
TEXT = {"type": "text", "text": "a"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "does it", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
HISTORY = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "tool_call_id": "call_0", "content": "2"},
]
RESPONSE_INPUT = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "function_call", "call_id": "call_0", "name": "f", "arguments": '{"a": 1}'},
    {"type": "function_call_output", "call_id": "call_0", "output": "2"},
]
CONVERSATION = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_0", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_0", "content": "2"}]},
]
VALID: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hello", "max_tokens": 3}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "logprobs": 2, "echo": True, "max_tokens": 2, "seed": 3}),
    ("/v1/completions", {"prompt": [65, 66], "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": [[65], [66, 67]], "best_of": 3, "n": 2, "return_token_ids": True, "max_tokens": 2}),
    ("/v1/completions", {"prompt": "a", "use_beam_search": True, "n": 2, "length_penalty": 0.5, "max_tokens": 3}),
    ("/v1/completions", {"prompt": "a", "prompt_logprobs": 3, "truncate_prompt_tokens": 4, "cache_salt": "x"}),
    ("/v1/completions", {"prompt": "a", "bad_words": ["b", "cd"], "logit_bias": {"65": 2.5}, "max_tokens": 4}),
    ("/v1/completions", {"prompt": "a", "allowed_token_ids": [65, 66], "stop_token_ids": [67], "min_tokens": 2}),
    (
        "/v1/completions",
        {"prompt": "a", "stop": ["x", "yz"], "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
    ),
    ("/v1/completions", {"prompt": "a", "timeout_s": 5.0, "request_id": "mine", "user": "Ann", "priority": 0}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "n": 2, "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True, "max_completion_tokens": 3}),
    ("/v1/chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"shout": True}, "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "auto", "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "max_tokens": 9}),
    ("/v1/chat/completions", {"messages": HISTORY, "tools": [TOOL], "tool_choice": "none", "max_tokens": 2}),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            "max_tokens": 9,
        },
    ),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "[a-z]+"}, "max_tokens": 4}),
    ("/v1/responses", {"input": "hello", "instructions": "be brief", "max_output_tokens": 3}),
    ("/v1/responses", {"input": RESPONSE_INPUT, "tools": [{"type": "function", **FUNCTION}], "stream": True}),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}),
    ("/v1/responses", {"input": "a", "previous_response_id": "resp_0", "store": True, "reasoning": {"effort": "low"}}),
    ("/v1/responses/input_tokens", {"input": "hello", "instructions": "be brief"}),
    ("/v1/messages", {"model": "tiny", "max_tokens": 3, "messages": CONVERSATION, "system": "be brief"}),
    (
        "/v1/messages",
        {
            "model": "tiny",
            "max_tokens": 9,
            "messages": CONVERSATION,
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
            "stop_sequences": ["x"],
            "thinking": {"type": "disabled"},
            "metadata": {"user_id": "Ann"},
        },
    ),
    ("/v1/messages", {"model": "tiny", "max_tokens": 3, "messages": CONVERSATION, "stream": True, "top_k": 3}),
    ("/v1/messages/count_tokens", {"model": "tiny", "messages": CONVERSATION, "system": [TEXT]}),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 4}),
    ("/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
    ("/score", {"text_1": "a", "text_2": ["b", "c"]}),
    ("/tokenize", {"prompt": "hello", "return_token_strs": True}),
    ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [65, 66, 256]}),
]


def _corpus() -> list[tuple[str, Callable[[], bytes]]]:
    """(path, makes the body). Made when they are drawn: some are large."""
    path = "/v1/completions"

    def fields(**values: Any) -> Callable[[], bytes]:
        return lambda: json.dumps({"prompt": "a", "max_tokens": 2, **values}).encode()

    return [
        (path, lambda: b'{"prompt":"a","stream_options":{"' + b" - at `$" * 30_000 + b'\\n":1}}'),
        (path, lambda: b'{"prompt":"a","' + b" - at `$" * 30_000 + b'\\n":1}'),
        (path, lambda: b'{"prompt":"a","logit_bias":{"' + b"9" * 100_000 + b'":1}}'),
        (path, lambda: b'{"prompt":"a","seed":' + b"9" * 100_000 + b"}"),
        (path, lambda: b'{"prompt":"a","seed":-' + b"9" * 4_000 + b"}"),
        (path, lambda: b'{"prompt":"a","temperature":1' + b"0" * 5_000 + b"}"),
        (path, lambda: b"[" * 100_000),
        (path, lambda: b'{"prompt":' * 50_000),
        (path, lambda: b'{"prompt":"a","chat_template_kwargs":' + b'{"a":' * 900 + b"1" + b"}" * 901),
        (path, lambda: b'{"prompt":"a","temperature":NaN}'),
        (path, lambda: b'{"prompt":"a","temperature":-Infinity}'),
        (path, lambda: b'{"prompt":"a","prompt":"b","n":1,"n":2}'),
        (path, lambda: b'{"prompt":"\\ud800"}'),
        (path, lambda: b'{"prompt":"\xff"}'),
        (path, lambda: b'{"prompt":"a","request_id":"abc\\n"}'),
        (path, fields(allowed_token_ids=[9] * 2**17, n=8)),
        (path, fields(allowed_token_ids=list(range(2**17)), n=8)),
        (path, fields(bad_words=["x" * 1000] * 1024, n=8)),
        (path, fields(bad_words=["x y" * 5] * 1000, n=8)),
        (path, fields(prompt=[[65] * 200] * 1024, prompt_logprobs=20)),
        (path, fields(prompt=["x" * 200] * 1024, logprobs=20, echo=True, max_tokens=0)),
        (path, fields(n=256, max_tokens=10**9, logprobs=20)),
        (path, fields(prompt="x" * 200_000, add_special_tokens=False)),
        (path, fields(prompt="x" * 200_000, truncate_prompt_tokens=3)),
        (path, fields(stop_token_ids=[300], min_tokens=1)),
        (path, fields(logit_bias={"300": 1.0})),
        (path, fields(priority=-100)),
        (path, fields(model="x" * 100_000)),
        ("/v1/chat/completions", lambda: json.dumps({"messages": [{"role": "x" * 100_000}]}).encode()),
        ("/tokenize", lambda: json.dumps({"prompt": "x" * 1_000_000}).encode()),
        ("/detokenize", lambda: b'{"tokens":[' + b"65," * 100_000 + b"65]}"),
        ("/detokenize", lambda: b'{"tokens":[2147483647]}'),
        ("/detokenize", lambda: b'{"tokens":[9223372036854775808]}'),
    ]


CORPUS = _corpus()

NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 2, 255, 257, 2**31, 2**63, -(2**63), 2**64, 10**400, 0.5, -0.0, 1e308, 5e-324, "",
    "x", "\x00", "\u202e", "\ud800", "é" * 300, " - at `$.n`", "[]", "1", "nan", "{{ 7*7 }}", "\n", [], [[]], [None],
    [0] * 300, ["a"] * 70, [1.5], ["a", 1], {}, {"": 0}, {"a": {"b": []}}, {"1": 1e9}, {"-1": 1}, {"type": "text"},
    "never", "x" * 2000,
]  # fmt: skip


def mutated(body: dict[str, Any], rng: random.Random) -> bytes:
    """The body with a few fields changed, added, renamed or removed, or its bytes damaged."""
    body = copy.deepcopy(body)
    other = rng.choice(VALID)[1]
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        name = rng.choice([*body, *other, *rng.choice(VALID)[1]])
        kind = rng.randrange(6)
        if kind <= 2:
            body[name] = copy.deepcopy(rng.choice(NASTY))
        elif kind == 3:
            body[rng.choice([name + "_", name.upper(), name * 40, "\x00", "$.n"])] = rng.choice(NASTY)
        elif kind == 4:
            body[name] = _mixed(body.get(name, other.get(name)), rng)
        else:
            body.pop(name, None)
    text = json.dumps(body, ensure_ascii=rng.random() < 0.8).encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        cut = rng.randrange(len(text))
        text = (
            text[:cut]
            + rng.choice((b"", b"\x00", b"\xff", b",", b"}", b"1e999", b'"'))
            + text[cut + rng.randrange(3) :]
        )
    return text


def _mixed(value: Any, rng: random.Random) -> Any:
    """A value like this one, with something nasty inside."""
    nasty = rng.choice(NASTY)
    if isinstance(value, dict):
        return {**value, rng.choice(["a", "1", "\n", "role", "content", "x" * 200]): nasty}
    if isinstance(value, list):
        return [*value, nasty] if rng.random() < 0.5 else [_mixed(entry, rng) for entry in value]
    if isinstance(value, str):
        return value * rng.choice((0, 2, 50))
    if isinstance(value, int | float) and abs(value) < 2**62:
        return rng.choice((-value, value * 10, value + 0.5, str(value), [value]))
    return nasty


def documented_statuses() -> dict[str, set[int]]:
    """Of each path that takes a body, from the OpenAPI document."""
    paths = api_description()["paths"]
    return {
        path: {int(status) for status in entry["post"]["responses"]} for path, entry in paths.items() if "post" in entry
    }


class Target:
    """One server, driven from outside its event loop."""

    def __init__(self, served: Served, loop: asyncio.AbstractEventLoop) -> None:
        self._served = served
        self._loop = loop
        self._statuses = documented_statuses()

    def attack(self, rng: random.Random) -> None:
        if rng.random() < 0.25:
            path, make = rng.choice(CORPUS)
            body = make()
        else:
            path, valid = rng.choice(VALID)
            body = mutated(valid, rng)
        self._loop.run_until_complete(self._send(path, body))

    async def _send(self, path: str, body: bytes) -> None:
        what = f"{path} {body[:300]!r}"
        response = await self._served.client.post(path, content=body, headers={"Content-Type": "application/json"})
        status, answer = response.status_code, response.content
        assert status in self._statuses[path], f"undocumented status {status} of {what}: {answer[:300]!r}"
        assert status < 500, f"{status} of {what}: {answer[:300]!r}"
        if status == 200:
            assert len(answer) <= 2 * MAX_ANSWER_BYTES, f"an answer of {len(answer)} bytes to {what}"
            if response.headers["content-type"].startswith("application/json"):
                json.loads(answer)
        else:
            names = {"message", "type"} if path.startswith(MESSAGES_PATH) else {"message", "type", "param", "code"}
            assert set(json.loads(answer)["error"]) == names, what
            assert len(answer) <= ERROR_BYTES, f"an error of {len(answer)} bytes to {what}"
        assert self._served.engine.num_unfinished == 0, f"something of {what} is left"

    async def finish(self) -> None:
        """Nothing is left: no request, no block, no task."""
        async with asyncio.timeout(60):
            await self._served.until_idle()
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, f"tasks are left: {left}"


@contextmanager
def target() -> Iterator[Attack]:
    loop = asyncio.new_event_loop()
    try:
        with tempfile.TemporaryDirectory() as directory:
            server = serving(write_model(Path(directory) / "tiny"))
            served = loop.run_until_complete(server.__aenter__())
            try:
                attacked = Target(served, loop)
                yield attacked.attack
                loop.run_until_complete(attacked.finish())
            finally:
                loop.run_until_complete(server.__aexit__(None, None, None))
    finally:
        loop.close()
        gc.collect()


BODIES = Fuzzer("bodies", target, num_test_cases=250)
