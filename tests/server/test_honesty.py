"""No known field is ignored: each has an effect that is shown here, or is refused with 400 and its name."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from quire.sampling_params import RepetitionDetectionParams, SamplingParams
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.completion import CompletionRequest
from quire.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from quire.structured_outputs_params import StructuredOutputsParams
from tests.server.conftest import Served, serving

PATHS = {CompletionRequest: "/v1/completions", ChatRequest: "/v1/chat/completions"}
BASE: dict[type, dict[str, Any]] = {
    CompletionRequest: {"prompt": "hello", "max_tokens": 3},
    ChatRequest: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
}


class Seen(NamedTuple):
    """What one request came to: the engine's arguments, and the answer."""

    prompt: Any
    params: SamplingParams
    request_id: str
    cache_salt: str
    priority: int
    status: int
    text: str
    answer: Any


Effect = Callable[[Seen, Seen], bool]
"""(with the field, without it) -> whether the field did what it says."""

SAMPLING: dict[str, tuple[Any, Any]] = {
    "n": (2, 2),
    "temperature": (0.5, 0.5),
    "top_p": (0.5, 0.5),
    "top_k": (7, 7),
    "min_p": (0.1, 0.1),
    "presence_penalty": (0.5, 0.5),
    "frequency_penalty": (-0.5, -0.5),
    "repetition_penalty": (1.2, 1.2),
    "seed": (3, 3),
    "stop": ("x", ["x"]),
    "stop_token_ids": ([5], [5]),
    "include_stop_str_in_output": (True, True),
    "ignore_eos": (True, True),
    "min_tokens": (2, 2),
    "skip_special_tokens": (False, False),
    "allowed_token_ids": ([64, 65], [64, 65]),
    "bad_words": (["x"], ["x"]),
    "logit_bias": ({"64": 5}, {64: 5.0}),
    "prompt_logprobs": (2, 2),
    "truncate_prompt_tokens": (2, 2),
    "truncation_side": ("right", "right"),
    "repetition_detection": (
        {"max_pattern_size": 4, "min_count": 2},
        RepetitionDetectionParams(max_pattern_size=4, min_count=2),
    ),
    "timeout_s": (7, 7.0),
}
"""Fields that the engine gets as they are: (value in the request, value in SamplingParams)."""

COMMON: dict[str, tuple[Any, Effect]] = {
    "model": ("other", lambda seen, plain: seen.status == 404),
    "stream": (True, lambda seen, plain: seen.text.endswith("data: [DONE]\n\n")),
    "return_token_ids": (True, lambda seen, plain: len(seen.answer["choices"][0]["token_ids"]) == 3),
    "cache_salt": ("mine", lambda seen, plain: seen.cache_salt == "mine" and plain.cache_salt == ""),
    "request_id": (
        "mine",
        lambda seen, plain: seen.request_id.endswith("-mine") and seen.request_id == seen.answer["id"],
    ),
    "priority": (3, lambda seen, plain: seen.priority == 3 and plain.priority == 0),
    "max_tokens": (2, lambda seen, plain: seen.params.max_tokens == 2),
}

EFFECTS: dict[type, dict[str, tuple[Any, Effect]]] = {
    CompletionRequest: {
        **COMMON,
        "prompt": ("other", lambda seen, plain: seen.prompt == "other"),
        "logprobs": (2, lambda seen, plain: seen.params.logprobs == 2),
        "echo": (True, lambda seen, plain: seen.answer["choices"][0]["text"].startswith("hello")),
        "best_of": (2, lambda seen, plain: seen.params.best_of == 2),
        "use_beam_search": (True, lambda seen, plain: seen.params.use_beam_search and seen.status == 200),
        "beam_width": (2, lambda seen, plain: seen.status == 400),
        "add_special_tokens": (False, lambda seen, plain: usage(plain) == usage(seen) + 1),
    },
    ChatRequest: {
        **COMMON,
        "messages": ([{"role": "user", "content": "ho"}], lambda seen, plain: seen.prompt != plain.prompt),
        "max_completion_tokens": (3, lambda seen, plain: seen.params.max_tokens == 3),
        "logprobs": (True, lambda seen, plain: seen.params.logprobs == 0),
        "add_generation_prompt": (False, lambda seen, plain: usage(seen) < usage(plain)),
        "add_special_tokens": (True, lambda seen, plain: usage(seen) == usage(plain) + 1),
        "chat_template_kwargs": ({"shout": True}, lambda seen, plain: seen.prompt["prompt"].startswith("SHOUT")),
    },
}

STRUCTURED: dict[str, tuple[Any, str]] = {
    "response_format": ({"type": "json_object"}, "json_object"),
    "structured_outputs": ({"choice": ["yes", "no"]}, "choice"),
    "guided_json": ({"type": "object"}, "json"),
    "guided_regex": ("[a-z]+", "regex"),
    "guided_choice": (["yes", "no"], "choice"),
    "guided_grammar": ('root ::= "yes"', "grammar"),
}
"""Fields with a constraint: (value, the field of StructuredOutputsParams that it sets)."""

WITH_OTHERS: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "top_logprobs": {"logprobs": True, "top_logprobs": 3},
    "continue_final_message": {"continue_final_message": True, "messages": [{"role": "assistant", "content": "I"}]},
    "user": {"user": "Ann"},
    "guided_whitespace_pattern": {"guided_json": {"type": "array"}, "guided_whitespace_pattern": " "},
    "guided_decoding_backend": {"guided_json": {"type": "array"}, "guided_decoding_backend": "outlines"},
    "length_penalty": {"use_beam_search": True, "length_penalty": 0.5},
    "include_metrics": {},  # tests/server/test_observability.py
    "prediction": {},  # tests/server/test_drafts.py
    # These have their tests in tests/server/test_vllm_fields.py.
    "suffix": {},
    "chat_template": {},
    "documents": {},
    "echo": {},
    "reasoning_effort": {},
    "return_prompt_text": {},
    "use_beam_search": {},
    "stream_interval": {},
    "logprob_token_ids": {},  # tests/server/test_bundled_model.py
    "return_tokens_as_token_ids": {},
    "spaces_between_special_tokens": {},
    "early_stopping": {"use_beam_search": True, "early_stopping": "never"},
    "tools": {},  # these: test_tools.py
    "functions": {},
    "function_call": {},
    "thinking_token_budget": {},
    "num_speculative_tokens": {},  # no token depends on it: tests/e2e/test_drafts_in_text.py
    "tool_choice": {},
    "parallel_tool_calls": {},
    "include_reasoning": {},
}
"""Fields with a test of their own below: they need another field, or show elsewhere than in the answer."""

OF_PICTURES = ("mm_processor_kwargs", "media_io_kwargs")
"""Fields that concern pictures alone (tests/server/test_images.py)."""
OF_PROCESSORS = ("vllm_xargs",)
"""Fields that logits processors read (tests/server/test_logits_processors.py)."""
OF_ADAPTERS = ("lora",)
"""Fields about llama.cpp's adapters (tests/server/test_numbered_adapters.py)."""
UNSUPPORTED_VALUES: dict[str, Any] = {"best_of": 2, "length_penalty": 0.5}


def usage(seen: Seen) -> int:
    return seen.answer["usage"]["prompt_tokens"]


async def send(served: Served, kind: type, fields: dict[str, Any]) -> Seen:
    """Send one request and report what the engine was asked."""
    calls: list[tuple[Any, ...]] = []
    generate = type(served.engine).generate

    def listening(prompt: Any, params: Any, request_id: Any = None, **options: Any) -> Any:
        calls.append((prompt, params, request_id, options["cache_salt"], options["priority"]))
        return generate(served.engine, prompt, params, request_id, **options)

    served.engine.generate = listening  # type: ignore[method-assign]
    response = await served.client.post(PATHS[kind], json={**BASE[kind], **fields})
    call = calls[0] if calls else (None, None, "", "", 0)
    answer = response.json() if response.headers["content-type"] == "application/json" else None
    return Seen(*call, response.status_code, response.text, answer)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model_path: Path) -> AsyncIterator[Served]:
    """A server for all these requests, whose engine takes priorities."""
    async with serving(model_path, scheduling_policy="priority") as served:
        yield served


async def test_every_field_is_in_the_tables() -> None:
    for kind, effects in EFFECTS.items():
        others = {
            name
            for name in (*WITH_OTHERS, *OF_PICTURES, *OF_PROCESSORS, *OF_ADAPTERS)
            if name in kind.__struct_fields__
        }
        assert set(kind.__struct_fields__) == {*effects, *SAMPLING, *STRUCTURED, *others}
        assert not set(kind.UNSUPPORTED) & set(kind.__struct_fields__)


@pytest.mark.parametrize("kind", EFFECTS)
@pytest.mark.parametrize("name", SAMPLING)
async def test_sampling_fields_reach_the_engine(served: Served, kind: type, name: str) -> None:
    value, expected = SAMPLING[name]
    seen = await send(served, kind, {name: value})
    assert seen.status == 200, seen.text
    assert getattr(seen.params, name) == expected != getattr(SamplingParams(), name)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, effects in EFFECTS.items() for name in effects])
async def test_fields_have_their_effect(served: Served, kind: type, name: str) -> None:
    value, effect = EFFECTS[kind][name]
    plain = await send(served, kind, {})
    assert plain.status == 200
    assert effect(await send(served, kind, {name: value}), plain)


@pytest.mark.parametrize("kind", EFFECTS)
async def test_constraints_reach_the_engine(served: Served, kind: type) -> None:
    for name, (value, field) in STRUCTURED.items():
        seen = await send(served, kind, {name: value, "max_tokens": 50})
        assert seen.status == 200, seen.text
        assert getattr(seen.params.structured_outputs, field) not in (None, False)
    patterned = await send(served, kind, WITH_OTHERS["guided_whitespace_pattern"])
    assert patterned.params.structured_outputs.whitespace_pattern == " "
    chosen = await send(served, kind, WITH_OTHERS["guided_decoding_backend"])  # there is one, so it has no effect
    assert chosen.params.structured_outputs == StructuredOutputsParams(json={"type": "array"})


async def test_stream_options(served: Served) -> None:
    for kind in EFFECTS:
        assert '"usage":{"prompt_tokens"' in (await send(served, kind, WITH_OTHERS["stream_options"])).text


async def test_top_logprobs(served: Served) -> None:
    assert (await send(served, ChatRequest, WITH_OTHERS["top_logprobs"])).params.logprobs == 3


async def test_continue_final_message(served: Served) -> None:
    seen = await send(served, ChatRequest, WITH_OTHERS["continue_final_message"])
    assert seen.prompt["prompt"] == "<|start|>assistant: I"


@pytest.mark.parametrize("kind", EFFECTS)
async def test_user_is_in_the_log(served: Served, kind: type, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "quire.server"):
        seen = await send(served, kind, WITH_OTHERS["user"])
    assert seen.status == 200
    assert any("'Ann'" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in EFFECTS for name in kind.UNSUPPORTED])
async def test_known_fields_that_are_not_supported(served: Served, kind: type, name: str) -> None:
    value = UNSUPPORTED_VALUES.get(name, {"anything": "else"})
    seen = await send(served, kind, {name: value})
    assert seen.status == 400
    assert seen.answer["error"]["param"] == name
    assert seen.answer["error"]["code"] == "unsupported_parameter"
    assert seen.prompt is None
    for harmless in (None, *kind.UNSUPPORTED[name]):
        assert (await send(served, kind, {name: harmless})).status == 200


@pytest.mark.parametrize("kind", EFFECTS)
async def test_unknown_fields(served: Served, kind: type) -> None:
    seen = await send(served, kind, {"tempreature": 1})
    assert seen.status == 400
    assert seen.answer["error"]["param"] == "tempreature"
    assert "did you mean 'temperature'?" in seen.answer["error"]["message"]


async def test_tokenize_fields(served: Served) -> None:
    """The endpoints without an engine call: each field against the request without it."""

    async def post(path: str, **body: Any) -> Any:
        response = await served.client.post(path, json=body)
        return response.json() if response.status_code == 200 else response.status_code

    assert set(TokenizeRequest.__struct_fields__) - set(OF_PICTURES) == {
        "model", "prompt", "messages", "add_special_tokens", "return_token_strs",
        "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs",
        "documents", "tools", "content", "add_special", "with_pieces",
    }  # fmt: skip
    assert set(DetokenizeRequest.__struct_fields__) == {"model", "tokens"}
    hi = [{"role": "user", "content": "hi"}]
    plain, chat = await post("/tokenize", prompt="ab"), await post("/tokenize", messages=hi)
    assert plain == {"count": 3, "max_model_len": 256, "tokens": [256, 64, 65], "token_strs": None}
    assert (await post("/tokenize", prompt="ab", add_special_tokens=False))["tokens"] == [64, 65]
    assert (await post("/tokenize", prompt="ab", return_token_strs=True))["token_strs"] == ["<|start|>", "a", "b"]
    assert (await post("/tokenize", prompt=" é", return_token_strs=True))["token_strs"][1:] == ["Ġ", "Ã", "©"]
    assert (await post("/tokenize", messages=hi, add_generation_prompt=False))["count"] < chat["count"]
    assert (await post("/tokenize", messages=hi, add_special_tokens=True))["count"] == chat["count"] + 1
    assert (await post("/tokenize", messages=hi, chat_template_kwargs={"shout": 1}))["count"] > chat["count"]
    final = [*hi, {"role": "assistant", "content": "I"}]
    assert (await post("/tokenize", messages=final, continue_final_message=True))["tokens"][-1] == 40
    assert await post("/tokenize", prompt="ab", model="other") == 404
    assert await post("/detokenize", tokens=[256, 64, 65]) == {"prompt": "<|start|>ab", "content": "<|start|>ab"}
    assert await post("/detokenize", tokens=[64], model="other") == 404
    assert await post("/detokenize", tokens=[300]) == 400
    for field in ({"tools": [{"function": {"name": "f"}}]}, {"documents": [{"text": "d"}]}, {"chat_template": "x"}):
        assert await post("/tokenize", prompt="ab", **field) == 400
    assert await post("/tokenize", messages=hi, tools=[{}]) == 400
    assert await post("/tokenize", messages=hi, chat_template="x") == 400
    assert await post("/detokenize", tokens=[64], token=[64]) == 400
