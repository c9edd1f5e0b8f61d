"""POST /v1/chat/completions over a real engine core and a fake model."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from quire.server.protocol.messages import MAX_MESSAGES, ChatMessage
from tests.server.conftest import Served
from tests.server.sse import chunks

HI = [{"role": "user", "content": "hi"}]


async def chat(served: Served, **body: Any) -> dict[str, Any]:
    response = await served.client.post("/v1/chat/completions", json={"messages": HI, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def stream(served: Served, **body: Any) -> list[dict[str, Any]]:
    response = await served.client.post("/v1/chat/completions", json={"messages": HI, "stream": True, **body})
    assert response.status_code == 200, response.text
    return chunks(response.text)


async def rendered(served: Served, **body: Any) -> str:
    """The prompt that a request makes."""
    answer = await chat(served, **body, max_tokens=1, return_token_ids=True)
    return served.context.tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)


async def test_shape_of_an_answer(served: Served) -> None:
    answer = await chat(served, model="tiny", max_tokens=5)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    [choice] = answer["choices"]
    content = choice["message"].pop("content")
    assert len(content) == 5
    assert choice == {
        "index": 0,
        "message": {
            "role": "assistant",
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
            "reasoning_content": None,
        },
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": None,
    }
    for name in ("service_tier", "prompt_logprobs", "prompt_token_ids", "kv_transfer_params"):
        assert answer[name] is None
    assert answer["usage"]["completion_tokens"] == 5


async def test_without_a_limit_it_runs_to_the_context(served: Served) -> None:
    answer = await chat(served)
    assert answer["usage"]["total_tokens"] == served.engine.ready.max_model_len
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_both_names_of_the_limit(served: Served, name: str) -> None:
    assert (await chat(served, **{name: 3}))["usage"]["completion_tokens"] == 3


class TestTemplate:
    async def test_roles_and_generation_prompt(self, served: Served) -> None:
        messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "name": "Ann", "content": "hi"}]
        text = await rendered(served, messages=messages)
        assert text == "<|start|>system: be brief<|end|><|start|>user (Ann): hi<|end|><|start|>assistant: "

    async def test_parts_of_a_message(self, served: Served) -> None:
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        assert "user: one\ntwo<|end|>" in await rendered(served, messages=[{"role": "user", "content": parts}])

    async def test_no_generation_prompt(self, served: Served) -> None:
        assert await rendered(served, add_generation_prompt=False) == "<|start|>user: hi<|end|>"

    async def test_continuing_the_last_message(self, served: Served) -> None:
        messages = [*HI, {"role": "assistant", "content": "I am"}]
        text = await rendered(served, messages=messages, continue_final_message=True)
        assert text.endswith("<|start|>assistant: I am")

    async def test_template_options(self, served: Served) -> None:
        assert (await rendered(served, chat_template_kwargs={"shout": True})).startswith("SHOUT <|start|>")

    async def test_reserved_template_options_are_refused(self, served: Served) -> None:
        for name in ("tokenize", "chat_template", "messages"):
            body = {"messages": HI, "chat_template_kwargs": {name: True}}
            response = await served.client.post("/v1/chat/completions", json=body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "chat_template_kwargs"

    async def test_special_tokens_are_the_templates_own(self, served: Served) -> None:
        assert (await rendered(served)).count("<|start|>") == 2
        assert (await rendered(served, add_special_tokens=True)).count("<|start|>") == 3


class TestStreaming:
    async def test_role_text_end(self, served: Served) -> None:
        found = await stream(served, max_tokens=3)
        assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"}
        deltas = [chunk["choices"][0]["delta"] for chunk in found]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert [set(delta) for delta in deltas[1:]] == [{"content"}] * 3
        assert [chunk["choices"][0]["finish_reason"] for chunk in found] == [None, None, None, "length"]

    async def test_adds_up_to_the_whole_answer(self, served: Served) -> None:
        body = {"max_tokens": 9, "n": 2, "seed": 5, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
        whole = await chat(served, **body, prompt_logprobs=1)
        found = await stream(served, **body, prompt_logprobs=1, stream_options={"include_usage": True})
        assert found[-1]["choices"] == []
        assert found[-1]["usage"] | {"prompt_tokens_details": None} == whole["usage"] | {"prompt_tokens_details": None}
        assert [chunk["prompt_logprobs"] for chunk in found if "prompt_logprobs" in chunk] == [whole["prompt_logprobs"]]
        for index, choice in enumerate(whole["choices"]):
            pieces = [
                chunk["choices"][0] for chunk in found if chunk["choices"] and chunk["choices"][0]["index"] == index
            ]
            assert [piece["delta"].get("role") for piece in pieces] == ["assistant"] + [None] * (len(pieces) - 1)
            assert "".join(piece["delta"].get("content", "") for piece in pieces) == choice["message"]["content"]
            logprobs = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]]
            assert logprobs == choice["logprobs"]["content"]
            assert [token for piece in pieces for token in piece.get("token_ids", [])] == choice["token_ids"]
            assert pieces[-1]["finish_reason"] == choice["finish_reason"]

    async def test_an_error_before_the_first_token_is_an_ordinary_one(self, served: Served) -> None:
        body = {"messages": [{"role": "user", "content": "a" * 300}], "stream": True}
        response = await served.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"


class TestLogprobs:
    async def test_entries(self, served: Served) -> None:
        answer = await chat(served, messages=[*HI, {"role": "assistant", "content": "x"}], logprobs=True, max_tokens=2)
        [first, second] = answer["choices"][0]["logprobs"]["content"]
        assert first["top_logprobs"] == second["top_logprobs"] == []
        assert first["logprob"] == -1.0
        assert bytes(first["bytes"] + second["bytes"]).decode() == answer["choices"][0]["message"]["content"]

    async def test_number_of_alternatives(self, served: Served) -> None:
        answer = await chat(served, logprobs=True, top_logprobs=3, max_tokens=4)
        for entry in answer["choices"][0]["logprobs"]["content"]:
            logprobs = [top["logprob"] for top in entry["top_logprobs"]]
            assert len(logprobs) == 3
            assert logprobs == sorted(logprobs, reverse=True)

    async def test_bytes_tell_what_the_text_of_half_a_character_cannot(self, served: Served) -> None:
        answer = await chat(served, messages=[{"role": "user", "content": "=é"}], logprobs=True)
        assert answer["choices"][0]["message"]["content"] == "é"
        entries = answer["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == ["\ufffd", "\ufffd", "<|end|>"]
        assert bytes(entries[0]["bytes"] + entries[1]["bytes"]).decode() == "é"


async def test_finish_by_end_token_and_stop_string(served: Served) -> None:
    messages = [{"role": "user", "content": "=one two"}]
    for stop, content in ((None, "one two"), (" t", "one")):
        [choice] = (await chat(served, messages=messages, stop=stop))["choices"]
        assert choice["message"]["content"] == content
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


async def test_request_id_becomes_the_id(served: Served) -> None:
    assert (await chat(served, max_tokens=1, request_id="mine"))["id"] == "chatcmpl-mine"


async def test_a_time_limit_ends_an_answer(live: Served) -> None:
    answer = await chat(live, max_tokens=200, ignore_eos=True, timeout_s=0.3)
    assert answer["choices"][0]["finish_reason"] == "timeout"
    assert len(answer["choices"][0]["message"]["content"]) == answer["usage"]["completion_tokens"] < 200
    found = await stream(live, max_tokens=200, timeout_s=1e-9, logprobs=True)
    assert [choice["finish_reason"] for chunk in found for choice in chunk["choices"]][-1] == "timeout"
    await live.until_idle()


async def test_long_conversations_are_put_together_off_the_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part weighs as much as some text: a great number of empty ones keeps the loop from other requests, too."""
    threads: list[int] = []
    to_dict = ChatMessage.to_dict

    def noting(message: ChatMessage) -> dict[str, str]:
        threads.append(threading.get_ident())
        return to_dict(message)

    monkeypatch.setattr(ChatMessage, "to_dict", noting)
    for content, is_long in (("a", False), ([{"type": "text", "text": ""}] * 1000, True)):
        threads.clear()
        await served.client.post("/tokenize", json={"messages": [{"role": "user", "content": content}]})
        assert [thread != threading.get_ident() for thread in threads] == [is_long]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
async def test_conversations_of_too_many_messages_are_refused(
    served: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(ChatMessage, "to_dict")
    messages = [{"role": "user", "content": ""}] * (MAX_MESSAGES + 1)
    response = await served.client.post(path, json={"messages": messages})
    assert response.status_code == 400
    assert f"length <= {MAX_MESSAGES}" in response.json()["error"]["message"]


async def test_conversations_of_one_request(served: Served) -> None:
    """Each has the answer that it has alone, and the choice of its index; what they used is summed."""
    conversations = [[{"role": "user", "content": text}] for text in ("hi", "hello there", "hi")] * 5
    settings = {"max_tokens": 3, "temperature": 0, "logprobs": True, "return_token_ids": True}
    path = "/v1/chat/completions/batch"
    answer = (await served.client.post(path, json={"messages": conversations, **settings})).json()
    alone = [await chat(served, messages=each, **settings) for each in conversations[:3]] * 5
    expected = [{**each["choices"][0], "index": index} for index, each in enumerate(alone)]
    assert answer["choices"] == expected
    assert answer["usage"]["total_tokens"] == sum(each["usage"]["total_tokens"] for each in alone)
    assert answer["usage"]["completion_tokens"] == 45
    for more in ({"stream": True}, {"n": 2}, {"use_beam_search": True}, {"messages": []}, {"messages": HI}):
        refused = await served.client.post(path, json={"messages": conversations, **settings, **more})
        assert (refused.status_code, refused.json()["error"]["param"].split("[")[0]) == (400, next(iter(more)))
    heavy = await served.client.post(
        path,
        json={"messages": [HI] * 1024, "max_tokens": 100, "logprobs": True, "top_logprobs": 20},
    )
    assert (heavy.status_code, "sequences x" in heavy.text) == (400, True)
