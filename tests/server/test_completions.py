"""POST /v1/completions over a real engine core and a fake model."""

from __future__ import annotations

from typing import Any

import pytest

from quire.server.completions import CompletionAnswer
from quire.server.streaming import EventTemplate
from tests.server.conftest import Served
from tests.server.sse import chunks

LETTERS = [64 + index for index in range(26)]


async def complete(served: Served, **body: Any) -> dict[str, Any]:
    response = await served.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    return response.json()


async def stream(served: Served, **body: Any) -> list[dict[str, Any]]:
    response = await served.client.post("/v1/completions", json={"stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    return chunks(response.text)


def joined(found: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices that a stream's chunks add up to, in the shape of a whole answer."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in found:
        for piece in chunk["choices"]:
            known = choices.setdefault(piece["index"], piece)
            if known is piece:
                for name in ("prompt_logprobs", "token_ids", "prompt_token_ids"):
                    piece.setdefault(name)  # null in a whole answer
                continue
            assert known["finish_reason"] is None, "a chunk after the end of its choice"
            known["text"] += piece["text"]
            known["finish_reason"], known["stop_reason"] = piece["finish_reason"], piece["stop_reason"]
            if "token_ids" in piece:
                known["token_ids"] += piece["token_ids"]
            for column, values in (piece["logprobs"] or {}).items():
                known["logprobs"][column] += values
    return choices


async def test_shape_of_an_answer(served: Served) -> None:
    answer = await complete(served, model="tiny", prompt="hello", max_tokens=5)
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["created"] >= served.context.created
    assert answer["system_fingerprint"].startswith("quire-")
    [choice] = answer["choices"]
    assert len(choice.pop("text")) == 5
    assert choice == {
        "index": 0,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "prompt_logprobs": None,
        "token_ids": None,
        "prompt_token_ids": None,
    }
    assert (answer["service_tier"], answer["kv_transfer_params"]) == (None, None)
    assert answer["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 5,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_default_is_sixteen_tokens(served: Served) -> None:
    answer = await complete(served, prompt="hello", temperature=0)
    assert answer["usage"]["completion_tokens"] == 16


async def test_end_of_sequence(served: Served) -> None:
    answer = await complete(served, prompt="=bye", max_tokens=50)
    assert answer["choices"][0]["text"] == "bye"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] is None
    assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("include", [False, True])
async def test_stop_string(served: Served, include: bool) -> None:
    body = {"prompt": "=one two three", "stop": ["two"], "include_stop_str_in_output": include, "max_tokens": 50}
    answer = await complete(served, **body)
    [choice] = answer["choices"]
    assert choice["text"] == ("one two" if include else "one ")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "two")
    assert joined(await stream(served, **body))[0]["text"] == choice["text"]
    await served.until_idle()


async def test_stop_token(served: Served) -> None:
    answer = await complete(served, prompt="=abc", stop_token_ids=[65], max_tokens=50)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", 65)


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [("a", 1), (["a", "bb", "ccc"], 3), ([256, 64, 65], 1), ([[256, 64], [256, 65], [256, 66]], 3)],
)
async def test_every_form_of_a_prompt(served: Served, prompt: Any, num_prompts: int) -> None:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "n": 2, "return_token_ids": True}
    answer = await complete(served, **body)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * num_prompts))
    singles = [prompt] if num_prompts == 1 else prompt
    for number, single in enumerate(singles):
        alone = (await complete(served, **{**body, "prompt": single, "n": 1}))["choices"][0]
        for choice in answer["choices"][2 * number : 2 * number + 2]:
            assert choice["text"] == alone["text"]
            assert choice["prompt_token_ids"] == alone["prompt_token_ids"]
    assert answer["usage"]["completion_tokens"] == 4 * 2 * num_prompts
    streamed = joined(await stream(served, **body))
    assert streamed == {choice["index"]: choice for choice in answer["choices"]}


async def test_usage_counts_a_prompt_once_for_its_n_completions(served: Served) -> None:
    answer = await complete(served, prompt=["ab", "abc"], n=3, max_tokens=2)
    assert answer["usage"]["prompt_tokens"] == 3 + 4
    assert answer["usage"]["completion_tokens"] == 12


async def test_cached_tokens_are_reported(served: Served) -> None:
    prompt = "x" * 63
    first = await complete(served, prompt=prompt, max_tokens=1)
    second = await complete(served, prompt=prompt, max_tokens=1)
    salted = await complete(served, prompt=prompt, max_tokens=1, cache_salt="mine")
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second, salted)]
    assert cached == [0, 48, 0]


async def test_seeds(served: Served) -> None:
    body = {"prompt": "abc", "max_tokens": 12, "temperature": 1.0, "n": 2}
    one, again, other = [(await complete(served, **body, seed=seed))["choices"] for seed in (1, 1, 2)]
    assert one == again
    assert one != other
    assert one[0]["text"] != one[1]["text"]


async def test_special_tokens_of_the_prompt(served: Served) -> None:
    for add, prefix in ((True, [256]), (False, [])):
        answer = await complete(served, prompt="ab", add_special_tokens=add, return_token_ids=True, max_tokens=1)
        assert answer["choices"][0]["prompt_token_ids"] == [*prefix, 64, 65]


async def test_truncated_prompt(served: Served) -> None:
    answer = await complete(served, prompt="abcdef", truncate_prompt_tokens=2, echo=True, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["choices"][0]["text"][:2] == "ef"


class TestStreaming:
    async def test_adds_up_to_the_whole_answer(self, served: Served) -> None:
        body = {"prompt": "=héllo wörld ☃", "n": 2, "logprobs": 2, "echo": True, "return_token_ids": True}
        body |= {"max_tokens": 40, "prompt_logprobs": 1}
        whole = await complete(served, **body)
        streamed = joined(await stream(served, **body))
        assert streamed == {choice["index"]: choice for choice in whole["choices"]}
        assert streamed[0]["text"] == "=héllo wörld ☃héllo wörld ☃"

    async def test_chunks(self, served: Served) -> None:
        found = await stream(served, prompt="=abc", max_tokens=10)
        assert len({chunk["id"] for chunk in found}) == 1
        assert {chunk["object"] for chunk in found} == {"text_completion"}
        assert [chunk["choices"][0]["finish_reason"] for chunk in found] == [None, None, None, "stop"]
        assert all("usage" not in chunk for chunk in found)

    @pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}, {"prompt": ["=a", "=bcd"]}])
    async def test_chunks_from_a_template_are_those_of_the_encoder(
        self, served: Served, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        body = {"prompt": '="a\\b\n\u2603\x01 \U0001f600', "max_tokens": 60, "request_id": "same", **more}
        made: list[str] = []
        event = EventTemplate.event
        monkeypatch.setattr(EventTemplate, "event", lambda self, text: made.append(text) or event(self, text))
        templated = await stream(served, **body)
        assert len(made) >= 2
        monkeypatch.setattr(CompletionAnswer, "_index_of_text", lambda *_: -1)
        made.clear()
        plain = await stream(served, **body)
        assert not made
        for chunk in (*templated, *plain):
            del chunk["created"]
        assert sorted(map(repr, templated)) == sorted(map(repr, plain))

    async def test_usage_comes_last_with_no_choices(self, served: Served) -> None:
        found = await stream(served, prompt="=abc", stream_options={"include_usage": True})
        assert found[-1]["choices"] == []
        assert found[-1]["usage"]["completion_tokens"] == 4
        assert all(chunk["usage"] is None for chunk in found[:-1])

    async def test_continuous_usage(self, served: Served) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        found = await stream(served, prompt="=abc", stream_options=options)
        assert [chunk["usage"]["completion_tokens"] for chunk in found] == [1, 2, 3, 4, 4]
        assert {chunk["usage"]["prompt_tokens"] for chunk in found} == {5}

    async def test_an_error_before_the_first_token_is_an_ordinary_one(self, served: Served) -> None:
        response = await served.client.post("/v1/completions", json={"prompt": "a" * 300, "stream": True})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"


class TestEcho:
    async def test_prompt_comes_first(self, served: Served) -> None:
        answer = await complete(served, prompt="=abc", echo=True)
        assert answer["choices"][0]["text"] == "=abcabc"
        assert answer["choices"][0]["logprobs"] is None

    async def test_prompt_of_token_ids(self, served: Served) -> None:
        answer = await complete(served, prompt=[28, 64, 65], echo=True)
        assert answer["choices"][0]["text"] == "=abab"

    async def test_scoring_a_prompt_generates_nothing(self, served: Served) -> None:
        answer = await complete(served, prompt="abc", echo=True, max_tokens=0, logprobs=1, return_token_ids=True)
        [choice] = answer["choices"]
        assert choice["text"] == "abc"
        assert choice["token_ids"] == []
        assert choice["finish_reason"] == "length"
        assert choice["logprobs"]["tokens"] == ["<|start|>", "a", "b", "c"]
        assert answer["usage"]["completion_tokens"] == 0
        streamed = joined(
            await stream(served, prompt="abc", echo=True, max_tokens=0, logprobs=1, return_token_ids=True)
        )
        assert streamed == {0: choice}


class TestLogprobs:
    async def test_four_columns(self, served: Served) -> None:
        answer = await complete(served, prompt="=héy", logprobs=2, echo=True, max_tokens=50)
        columns = answer["choices"][0]["logprobs"]
        assert columns["tokens"][:3] == ["<|start|>", "=", "h"]
        assert columns["tokens"][-2:] == ["y", "<|end|>"]
        assert columns["token_logprobs"][0] is None
        assert columns["top_logprobs"][0] is None
        assert set(columns["token_logprobs"][1:]) == {-1.0}
        assert all(token in top for token, top in zip(columns["tokens"][1:], columns["top_logprobs"][1:], strict=True))
        # Offsets count characters of the text "=héyhéy": the two bytes of é begin at the same one.
        assert columns["text_offset"] == [0, 0, 1, 2, 2, 3, 4, 5, 5, 6, 7]

    async def test_offsets_without_echo_begin_with_the_completion(self, served: Served) -> None:
        answer = await complete(served, prompt="=abc", logprobs=0)
        assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3]
        assert [len(top) for top in answer["choices"][0]["logprobs"]["top_logprobs"]] == [1, 1, 1, 1]

    async def test_echo_and_prompt_logprobs_each_get_their_number(self, served: Served) -> None:
        for logprobs, prompt_logprobs in ((3, 1), (1, 3)):
            body = {"prompt": "abc", "echo": True, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
            [choice] = (await complete(served, **body, max_tokens=0))["choices"]
            assert max(map(len, choice["logprobs"]["top_logprobs"][1:])) == 1 + logprobs
            assert max(map(len, choice["prompt_logprobs"][1:])) == 1 + prompt_logprobs

    async def test_prompt_logprobs_for_every_choice(self, served: Served) -> None:
        answer = await complete(served, prompt="abc", prompt_logprobs=1, n=3, max_tokens=2, temperature=1)
        for choice in answer["choices"]:
            first, *rest = choice["prompt_logprobs"]
            assert first is None
            assert [str(token) in entry for token, entry in zip([64, 65, 66], rest, strict=True)] == [True] * 3
            assert rest[0]["64"] == {"logprob": -1.0, "rank": 1, "decoded_token": "a"}


async def test_request_id_becomes_the_id(served: Served) -> None:
    response = await served.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "request_id": "mine"})
    assert response.json()["id"] == "cmpl-mine" == response.headers["x-request-id"]
    random = await complete(served, prompt="a", max_tokens=1)
    assert random["id"] not in ("cmpl-mine", "cmpl-")


async def test_beam_search(served: Served) -> None:
    body = {"prompt": "hello", "max_tokens": 5, "use_beam_search": True, "ignore_eos": True, "return_token_ids": True}
    answer = await complete(served, **body, n=2, beam_width=4, length_penalty=0, early_stopping="never", logprobs=1)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]]
    assert sums == sorted(sums, reverse=True)
    assert answer["usage"]["completion_tokens"] == sum(len(each["token_ids"]) for each in answer["choices"]) == 10
    for width in ({"best_of": 4}, {"n": 4}):
        same = await complete(served, **{**body, "n": 2, "length_penalty": 0, "early_stopping": "never", **width})
        assert [each["token_ids"] for each in same["choices"][:2]] == [each["token_ids"] for each in answer["choices"]]
    alone = await complete(served, **body, beam_width=4)
    assert len(alone["choices"]) == 1
    two = await complete(served, **{**body, "prompt": ["hello", "ho"], "echo": True}, n=2)
    assert [choice["index"] for choice in two["choices"]] == [0, 1, 2, 3]
    assert [choice["text"][:2] for choice in two["choices"]] == ["he", "he", "ho", "ho"]
    await served.until_idle()


async def test_best_of(served: Served) -> None:
    body = {"prompt": "hello", "max_tokens": 6, "seed": 4, "return_token_ids": True}
    answer = await complete(served, **body, n=2, best_of=6)
    assert len(answer["choices"]) == 2
    assert answer["usage"]["completion_tokens"] == sum(len(each["token_ids"]) for each in answer["choices"])
    await served.until_idle()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"use_beam_search": True, "n": 2, "stream": True}, "stream"),
        ({"n": 2, "best_of": 3, "stream": True}, "stream"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"use_beam_search": True, "beam_width": 33}, "beam_width"),
        ({"use_beam_search": True, "n": 3, "beam_width": 2}, "beam_width"),
        ({"use_beam_search": True, "n": 2, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "n": 2, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "n": 2, "early_stopping": "soon"}, "early_stopping"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": True, "beam_width": 9}, "best_of"),
    ],
)
async def test_what_is_refused_of_ranked_completions(served: Served, fields: dict[str, Any], param: str) -> None:
    response = await served.client.post("/v1/completions", json={"prompt": "hello", **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_a_time_limit_ends_an_answer_with_what_it_has(live: Served) -> None:
    answer = await complete(live, prompt="hello", max_tokens=200, ignore_eos=True, timeout_s=0.3)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "timeout"
    assert len(choice["text"]) == answer["usage"]["completion_tokens"] < 200
    found = await stream(live, prompt="hello", max_tokens=200, ignore_eos=True, timeout_s=0.3, n=2)
    assert [choice["finish_reason"] for choice in joined(found).values()] == ["timeout", "timeout"]
    await live.until_idle()


@pytest.mark.parametrize(
    "more", [{}, {"echo": True}, {"echo": True, "logprobs": 1}, {"echo": True, "max_tokens": 0}, {"prompt_logprobs": 0}]
)
async def test_a_time_limit_may_be_over_before_anything_was_computed(served: Served, more: dict[str, Any]) -> None:
    body = {"prompt": "hello", "max_tokens": 5, "timeout_s": 1e-9, **more}
    answer = await complete(served, **body)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "timeout"
    assert choice["text"] == ("hello" if "echo" in more else "")
    assert answer["usage"]["completion_tokens"] == 0
    [streamed] = joined(await stream(served, **body)).values()
    assert (streamed["finish_reason"], streamed["text"]) == ("timeout", choice["text"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout_s", 0),
        ("timeout_s", -1),
        ("timeout_s", "soon"),
        ("priority", 2**63),
        ("priority", -(2**63) - 1),
        ("priority", 0.5),
    ],
)
async def test_limits_of_time_and_priority(served: Served, name: str, value: object) -> None:
    response = await served.client.post("/v1/completions", json={"prompt": "hello", name: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name
