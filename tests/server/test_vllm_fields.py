"""Every field of vLLM's completion and chat requests: it has an effect, means nothing here, or is refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest

from quire.request import EngineRequest
from quire.server.answer import with_defaults
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.common import RequestStruct
from quire.server.protocol.completion import CompletionRequest
from quire.server.settings import ServerSettings
from tests.server.conftest import Served, serving
from tests.server.sse import chunks

Outcome = Literal["effect", "nothing", "refused", "reported"]

BOTH: dict[str, Outcome] = {
    "add_special_tokens": "effect",
    "allowed_token_ids": "effect",
    "bad_words": "effect",
    "cache_salt": "effect",
    "ec_transfer_params": "refused",
    "echo": "effect",
    "frequency_penalty": "effect",
    "ignore_eos": "effect",
    "include_stop_str_in_output": "effect",
    "kv_transfer_params": "refused",
    "length_penalty": "effect",
    "logit_bias": "effect",
    "logprob_token_ids": "effect",
    "logprobs": "effect",
    "max_tokens": "effect",
    "min_p": "effect",
    "min_tokens": "effect",
    "model": "effect",
    "n": "effect",
    "presence_penalty": "effect",
    "priority": "effect",
    "prompt_logprobs": "effect",
    "repetition_detection": "effect",
    "repetition_penalty": "effect",
    "request_id": "effect",
    "response_format": "effect",
    "return_mm_kwargs": "nothing",
    "return_token_ids": "effect",
    "return_token_offsets": "nothing",
    "return_tokens_as_token_ids": "effect",
    "routed_experts_prompt_start": "refused",
    "seed": "effect",
    "session_id": "nothing",
    "skip_special_tokens": "effect",
    "spaces_between_special_tokens": "effect",
    "stop": "effect",
    "stop_token_ids": "effect",
    "stream": "effect",
    "stream_interval": "effect",
    "stream_options": "effect",
    "structured_outputs": "effect",
    "temperature": "effect",
    "top_k": "effect",
    "top_p": "effect",
    "thinking_token_budget": "effect",
    "truncate_prompt_tokens": "effect",
    "truncation_side": "effect",
    "use_beam_search": "effect",
    "user": "effect",
    "vllm_xargs": "effect",
    "watermarking": "refused",
}
COMPLETION: dict[str, Outcome] = {**BOTH, "prompt": "effect", "prompt_embeds": "refused", "suffix": "effect"}


CHAT: dict[str, Outcome] = {
    **BOTH,
    "add_generation_prompt": "effect",
    "chat_template": "effect",
    "chat_template_kwargs": "effect",
    "continue_final_message": "effect",
    "documents": "effect",
    "include_reasoning": "effect",
    "max_completion_tokens": "effect",
    "media_io_kwargs": "effect",
    "messages": "effect",
    "mm_processor_kwargs": "effect",
    "parallel_tool_calls": "effect",
    "reasoning_effort": "effect",
    "return_prompt_text": "effect",
    "thinking_token_budget": "effect",
    "tool_choice": "effect",
    "tools": "effect",
    "top_logprobs": "effect",
}


def outcome(kind: type[RequestStruct], name: str) -> Outcome | None:
    """What a field comes to, or None for one that would be reported as unknown."""
    if name in kind.__struct_fields__:
        return "effect"
    if name in kind.NO_EFFECT:
        return "nothing"
    if name in kind.EXTENSIONS:
        return "reported"
    return "refused" if name in kind.UNSUPPORTED else None


@pytest.mark.parametrize("name", COMPLETION)
def test_fields_of_completions(name: str) -> None:
    assert outcome(CompletionRequest, name) == COMPLETION[name]


@pytest.mark.parametrize("name", CHAT)
def test_fields_of_chats(name: str) -> None:
    assert outcome(ChatRequest, name) == CHAT[name]


async def complete(served: Served, **body: Any) -> dict[str, Any]:
    response = await served.client.post("/v1/completions", json={"temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def test_arguments_of_extensions_are_reported(served: Served) -> None:
    """They are for code that vLLM's users add to its engine. No key is a misspelling of another field."""
    body = {"prompt": "=ab", "vllm_xargs": {"target_token": 7, "temperatur": 0.5}}
    response = await served.client.post("/v1/completions", json=body)
    assert response.status_code == 200
    assert response.headers["x-quire-ignored"] == "vllm_xargs.target_token, vllm_xargs.temperatur"
    response = await served.client.post("/v1/completions", json={**body, "vllm_xargs": [1]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "vllm_xargs")


async def test_repetition_ends_a_completion(served: Served) -> None:
    """The model copies what stands behind "=": four times "ab", where a second time is enough."""
    settings = {"max_pattern_size": 3, "min_count": 2}
    body = {"prompt": "=xabababab", "max_tokens": 20}
    [plain] = (await complete(served, **body))["choices"]
    assert (plain["text"], plain["finish_reason"]) == ("xabababab", "stop")
    [choice] = (await complete(served, **body, repetition_detection=settings))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("xabab", "repetition")
    assert choice["stop_reason"] == "repetition_detected"
    await served.until_idle()
    [late] = (await complete(served, **body, repetition_detection=settings, min_tokens=7))["choices"]
    assert (late["text"], late["finish_reason"]) == ("xababab", "repetition")
    wrong = {**body, "repetition_detection": {"max_pattern_size": 3}}
    response = await served.client.post("/v1/completions", json=wrong)
    assert response.json()["error"]["param"] == "repetition_detection.min_count"


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, [66, 67]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, [66, 67]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, [256, 64]),
        ({"truncation_side": "right"}, [256, 64, 65, 66, 67]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 254}, [66, 67]),
        ({"truncate_prompt_tokens": -1, "truncation_side": "right", "max_tokens": 253}, [256, 64, 65]),
    ],
)
async def test_truncation(served: Served, fields: dict[str, Any], kept: list[int]) -> None:
    answer = await complete(served, **{"prompt": "abcd", "max_tokens": 2, "return_token_ids": True, **fields})
    assert answer["choices"][0]["prompt_token_ids"] == kept


async def test_what_the_server_says_where_requests_do_not(model_path: Path) -> None:
    settings = ServerSettings(return_tokens_as_token_ids=True, stream_interval=4)
    async with serving(model_path, settings) as served:
        body = {"prompt": "=abcdefgh", "logprobs": 0, "stream": True}
        found = chunks((await served.client.post("/v1/completions", json=body)).text)
        tokens = [chunk["choices"][0]["logprobs"]["tokens"] for chunk in found]
        assert sum(map(len, tokens)) == 9
        assert len(tokens) <= 3, "one token, then four or, where several steps were told at once, more"
        assert all(token.startswith("token_id:") for each in tokens for token in each)
        body |= {"stream_interval": 1, "return_tokens_as_token_ids": False}
        found = chunks((await served.client.post("/v1/completions", json=body)).text)
        assert found[0]["choices"][0]["logprobs"]["tokens"][0] == "a"
        request = CompletionRequest(prompt="a", stream_interval=1)
        assert with_defaults(request, served.context).stream_interval == 1


async def test_stream_interval(served: Served) -> None:
    body = {"prompt": "=abcdefghij", "max_tokens": 20, "stream": True}
    for interval, texts in ((1, 11), (4, 4), (100, 2)):
        response = await served.client.post("/v1/completions", json={**body, "stream_interval": interval})
        pieces = [chunk["choices"][0] for chunk in chunks(response.text)]
        assert "".join(piece["text"] for piece in pieces) == "abcdefghij"
        assert pieces[-1]["finish_reason"] == "stop"
        assert len(pieces) <= texts, "a slow reader gets several steps at once"
    two = {**body, "n": 2, "stream_interval": 4, "logprobs": 1}
    pieces = [chunk["choices"][0] for chunk in chunks((await served.client.post("/v1/completions", json=two)).text)]
    for index in range(2):
        mine = [piece for piece in pieces if piece["index"] == index]
        assert "".join(piece["text"] for piece in mine) == "abcdefghij"
        assert sum(len(piece["logprobs"]["tokens"]) for piece in mine) == 11


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_chunks_of_a_number_of_tokens_get_each_step_by_itself(
    served: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[bool] = []
    record = served.context.metrics.record_request

    def listen(request_id: str, request: EngineRequest, text: str | None) -> None:
        heard.append(request.each_step)
        record(request_id, request, text)

    monkeypatch.setattr(served.context.metrics, "record_request", listen)
    body: dict[str, Any] = {"prompt": "=ab", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    del body["messages" if path == "/v1/completions" else "prompt"]
    for more in ({}, {"stream": True}, {"stream": True, "stream_interval": 1}, {"stream_interval": 4}):
        assert (await served.client.post(path, json=body | more)).status_code == 200
    assert heard == [False, False, True, False]


async def test_tokens_named_by_their_ids(served: Served) -> None:
    answer = await complete(served, prompt="=ab", logprobs=1, return_tokens_as_token_ids=True, echo=True)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:256", "token_id:28", *["token_id:64", "token_id:65"] * 2, "token_id:257"]
    assert "token_id:64" in logprobs["top_logprobs"][2]


async def test_spaces_between_special_tokens(served: Served) -> None:
    plain = await complete(served, prompt="=ab")
    assert (await complete(served, prompt="=ab", spaces_between_special_tokens=False))["choices"] == plain["choices"]
    body = {"prompt": "=ab", "spaces_between_special_tokens": False, "skip_special_tokens": False}
    response = await served.client.post("/v1/completions", json=body)
    assert response.json()["error"]["param"] == "spaces_between_special_tokens"


async def test_a_suffix_needs_a_model_for_it(served: Served) -> None:
    for prompt in ("a", ["a", "b"], [64]):
        response = await served.client.post("/v1/completions", json={"prompt": prompt, "suffix": "b"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "suffix")
    await complete(served, prompt="a", suffix="")


HI = {"role": "user", "content": "hi"}
TEMPLATE = (
    "{% for d in documents or [] %}[{{ d.title }}]{% endfor %}{{ reasoning_effort }}/{{ enable_thinking }}"
    "{% for m in messages %}={{ m.content }}{% endfor %}"
)


@pytest.fixture
async def trusting(model_path: Path) -> AsyncIterator[Served]:
    async with serving(model_path, ServerSettings(trust_request_chat_template=True)) as served:
        yield served


async def chat(served: Served, **body: Any) -> dict[str, Any]:
    response = await served.client.post("/v1/chat/completions", json={"messages": [HI], "max_tokens": 4, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def test_templates_of_requests(trusting: Served, served: Served) -> None:
    body = {"chat_template": TEMPLATE, "return_prompt_text": True}
    assert (await chat(trusting, **body))["prompt_text"] == "/=hi"
    documents = [{"title": "a", "text": "b"}, {"title": "c", "text": "d"}]
    assert (await chat(trusting, **body, documents=documents))["prompt_text"] == "[a][c]/=hi"
    assert (await chat(trusting, **body, reasoning_effort="low"))["prompt_text"] == "low/True=hi"
    assert (await chat(trusting, **body, reasoning_effort="none"))["prompt_text"] == "none/False=hi"
    kwargs = {"enable_thinking": 7}
    answer = await chat(trusting, **body, reasoning_effort="none", chat_template_kwargs=kwargs)
    assert answer["prompt_text"] == "none/7=hi"
    counted = {
        "messages": [HI],
        "chat_template": "-{{ tools[0].function.name if tools }}{{ documents[0].title if documents }}",
    }
    for more, text in (({}, "-"), ({"tools": [{"function": {"name": "f"}}], "documents": documents}, "-fa")):
        response = await trusting.client.post("/tokenize", json={**counted, **more, "return_token_strs": True})
        assert "".join(response.json()["token_strs"]) == text
    for wrong in ({"chat_template": "{% for"}, {"reasoning_effort": "huge"}):
        response = await trusting.client.post("/v1/chat/completions", json={"messages": [HI], **wrong})
        assert response.status_code == 400
    response = await served.client.post("/v1/chat/completions", json={"messages": [HI], **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template")
    assert (await chat(served))["prompt_text"] is None


async def test_the_prompts_text_in_a_stream(served: Served) -> None:
    body = {"messages": [HI], "max_tokens": 2, "stream": True, "return_prompt_text": True}
    found = chunks((await served.client.post("/v1/chat/completions", json=body)).text)
    texts = [chunk["prompt_text"] for chunk in found if "prompt_text" in chunk]
    assert texts == ["<|start|>user: hi<|end|><|start|>assistant: "]


async def test_echo_in_a_chat(served: Served) -> None:
    said = {"role": "assistant", "content": [{"type": "text", "text": "I "}, {"type": "text", "text": "am"}]}
    body = {"messages": [HI, said], "continue_final_message": True, "echo": True, "temperature": 0}
    whole = (await chat(served, **body))["choices"][0]["message"]
    plain = (await chat(served, **{**body, "echo": False}))["choices"][0]["message"]
    assert whole["content"] == "I \nam" + plain["content"]
    response = await served.client.post("/v1/chat/completions", json={**body, "max_tokens": 4, "stream": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(response.text)]
    assert "".join(delta.get("content", "") for delta in deltas) == whole["content"]
    other = (await chat(served, echo=True))["choices"][0]["message"]["content"]  # the last message is the user's
    assert len(other) == 4


async def test_beams_in_a_chat(served: Served) -> None:
    body = {"use_beam_search": True, "n": 2, "length_penalty": 0.5, "early_stopping": "never"}
    answer = await chat(served, **body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    response = await served.client.post("/v1/chat/completions", json={"messages": [HI], **body, "stream": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream")
    response = await served.client.post("/v1/chat/completions", json={"messages": [HI], "length_penalty": 0.5})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "length_penalty")


async def test_tokens_of_a_chat_named_by_their_ids(served: Served) -> None:
    messages = [{"role": "user", "content": "=ab"}]
    body = {"messages": messages, "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    entries = (await chat(served, **body))["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["token_id:64", "token_id:65", "token_id:257"]
    assert entries[0]["top_logprobs"][0]["token"].startswith("token_id:")
    assert bytes(entries[0]["bytes"]) == b"a"
