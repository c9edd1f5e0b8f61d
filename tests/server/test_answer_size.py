"""What an answer may weigh, what /tokenize and /detokenize take, and where long texts are worked on."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from quire.engine.texts import INLINE_CHARACTERS
from quire.errors import UserError
from quire.outputs import CompletionOutput
from quire.server import answer_size
from quire.server.answer_size import AnswerSize
from quire.tokenization.tokenizer import Tokenizer
from tests.server.conftest import Served
from tests.server.model_directory import MAX_MODEL_LEN


async def rejected(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    before = (await served.engine.stats()).steps_total
    response = await served.client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert len(response.content) < 2_000
    assert served.engine.num_unfinished == 0
    assert (await served.engine.stats()).steps_total == before, "nothing of it has run"
    error: dict[str, Any] = response.json()["error"]
    return error


HEAVY = [
    {"prompt": ["x" * 200] * 1024, "prompt_logprobs": 20},
    {"prompt": [[65] * 200] * 1024, "prompt_logprobs": 20},
    {"prompt": [[65] * 200] * 1024, "prompt_logprobs": 20, "stream": True},
    {"prompt": ["x" * 250] * 16, "n": 256, "logprobs": 2, "echo": True, "max_tokens": 0},
    {"prompt": ["x" * 250] * 16, "n": 256, "best_of": 256, "logprobs": 20, "max_tokens": 200},
    {"prompt": ["x"] * 1024, "n": 4, "logprobs": 20, "max_tokens": 100},
    {
        "prompt": ["x"] * 1024,
        "n": 4,
        "prompt_logprobs": 0,
        "return_token_ids": True,
        "logprobs": 20,
        "max_tokens": 10**9,
    },
]


@pytest.mark.parametrize("body", HEAVY)
async def test_an_answer_that_would_be_too_large_is_refused_before_anything_runs(
    served: Served, body: dict[str, Any]
) -> None:
    error = await rejected(served, "/v1/completions", body)
    assert f"and may have {64 * 2**20}: " in error["message"]
    assert " x " in error["message"]


async def test_a_conversation_has_the_same_limit(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_size, "MAX_ANSWER_BYTES", 10_000)
    messages = [{"role": "user", "content": "x" * 100}]
    body = {"messages": messages, "max_tokens": 4, "prompt_logprobs": 1}
    assert "prompt tokens x 1 times x (2 logprobs" in (await rejected(served, "/v1/chat/completions", body))["message"]
    body = {"messages": messages, "max_tokens": 8, "logprobs": True, "top_logprobs": 20, "n": 3}
    error = await rejected(served, "/v1/chat/completions", body)
    assert "3 sequences x 8 tokens x 1352 bytes" in error["message"]


async def test_without_max_tokens_the_answer_is_weighed_as_it_comes(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_size, "MAX_ANSWER_BYTES", 10_000)
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    response = await served.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "generated so far" in response.json()["error"]["message"]
    await served.until_idle()
    streamed = await served.client.post("/v1/chat/completions", json={**body, "stream": True})
    assert streamed.status_code == 200
    assert len(streamed.content) > 10_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "x", "top_logprobs": 20, "include": ["message.output_text.logprobs"]}),
        ("/api/chat", {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}),
    ],
)
async def test_other_apis_have_the_same_limit(
    served: Served, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_size, "MAX_ANSWER_BYTES", 10_000)
    response = await served.client.post(path, json={**body, "model": "tiny", "stream": False, "ignore_eos": True})
    assert response.status_code == 400
    assert "the answer would have about" in response.text
    await served.until_idle()


def test_the_arithmetic() -> None:
    weight = AnswerSize(logprobs=None, return_token_ids=False, is_streamed=False)
    weight.prompt(2**20, 1, num_texts=0, num_entries=1)
    with pytest.raises(UserError, match=r"67108872 .* 67108864 of the prompts \+ 1 sequences x 1 tokens x 8 bytes"):
        weight.planned(1, 1)
    with pytest.raises(UserError, match="8 generated so far"):
        weight.generated([CompletionOutput(0, "x", [5])])
    with pytest.raises(UserError, match=r"\(1 logprobs of 64 bytes \+ 2 texts or ids of 8 bytes\)"):
        weight.prompt(1, 1, num_texts=2, num_entries=1)
    streamed = AnswerSize(logprobs=20, return_token_ids=True, is_streamed=True)
    streamed.planned(4096, 2**31)


@pytest.mark.parametrize("fields", [{"echo": True}, {"return_token_ids": True}, {"prompt_logprobs": 1}, {}])
async def test_what_is_light_is_answered_as_before(served: Served, fields: dict[str, Any]) -> None:
    body = {"prompt": ["hello", "abc"], "max_tokens": 2, "n": 2, "truncate_prompt_tokens": 3, **fields}
    response = await served.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert len(response.json()["choices"]) == 4
    empty = await served.client.post("/v1/completions", json={**body, "prompt": ["hello", ""]})
    assert (empty.status_code, empty.json()["error"]["param"]) == (400, "prompt")


async def test_tokenize_takes_a_text_as_long_as_a_prompt_may_be(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 64 * MAX_MODEL_LEN
    response = await served.client.post("/tokenize", json={"prompt": "x" * limit, "return_token_strs": True})
    assert response.json()["count"] == limit + 1
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("tokenised"))
    for path, body in (
        ("/tokenize", {"prompt": "x" * (limit + 1)}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * (limit + 1)}]}),
        ("/v1/completions", {"prompt": "x" * (limit + 1), "add_special_tokens": False}),
        ("/v1/completions", {"prompt": "x" * (limit + 1), "echo": True}),
        ("/v1/completions", {"prompt": "x" * (2**20 + 1), "truncate_prompt_tokens": 5}),
    ):
        error = await rejected(served, path, body)
        assert error["code"] == "context_length_exceeded"


async def test_detokenize_takes_as_many_ids_as_a_sequence_may_have(served: Served) -> None:
    ids = [65] * MAX_MODEL_LEN
    response = await served.client.post("/detokenize", json={"tokens": ids})
    assert len(response.json()["prompt"]) == len(ids)
    error = await rejected(served, "/detokenize", {"tokens": [*ids, 65]})
    assert (error["param"], "at most 256 tokens" in error["message"]) == ("tokens", True)


async def test_many_short_texts_leave_the_loop_its_turns(served: Served) -> None:
    """Texts run in order, as many in a turn of the loop as one long text has characters."""
    texts, done, turns = served.engine.texts, list[int](), 0

    async def work(number: int) -> None:
        await texts.off_loop(INLINE_CHARACTERS // 2, lambda: done.append(number))

    working = asyncio.gather(*map(work, range(20)))
    while not working.done():
        await asyncio.sleep(0)
        turns += 1
    assert done == list(range(20))
    assert turns >= 15


async def test_prompts_of_many_parts_are_read_at_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[threading.Thread]()
    encode = Tokenizer.encode_batch

    def noted(self: Tokenizer, *arguments: Any) -> list[list[int]]:
        threads.append(threading.current_thread())
        return encode(self, *arguments)

    monkeypatch.setattr(Tokenizer, "encode_batch", noted)
    parts = [1, *["ab"] * 250]
    error = await rejected(served, "/completion", {"prompt": parts, "n_predict": 1})
    assert "maximum context length" in error["message"]
    assert threading.main_thread() not in threads
    assert len(threads) == 1
    found = await served.engine.texts.encode_parts(["=a", 7, "", "b" * (INLINE_CHARACTERS // 100)])
    assert found == [*served.engine.tokenizer.encode("=a"), 7, *[65] * 200]  # type: ignore[union-attr]
    error = await rejected(served, "/completion", {"prompt": [1, *[""] * 99_999], "n_predict": 1})
    assert "the prompt has 100000 parts" in error["message"]
    biases = {"logit_bias": [["a", 1.0]] * 5000}
    assert "at most 4096" in (await rejected(served, "/completion", {"prompt": "a", **biases}))["message"]


async def test_long_texts_are_worked_on_two_at_a_time_and_off_the_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.texts.INLINE_CHARACTERS", 10)
    lock, release = threading.Lock(), threading.Event()
    running: list[int] = [0]
    most: list[int] = [0]
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        assert threading.current_thread() is not threading.main_thread()
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        assert release.wait(60)
        with lock:
            running[0] -= 1
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    body = {"prompt": "x" * 100}
    requests = [asyncio.ensure_future(served.client.post("/tokenize", json=body)) for _ in range(8)]
    while running[0] < 2:
        await asyncio.sleep(0.001)
    assert (await served.client.get("/health")).status_code == 200, "the loop is free meanwhile"
    release.set()
    assert [response.status_code for response in await asyncio.gather(*requests)] == [200] * 8
    assert most[0] == 2
