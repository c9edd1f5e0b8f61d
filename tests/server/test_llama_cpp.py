"""llama.cpp's door, by requests as its clients send them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from quire.server import llama_cpp
from quire.server.protocol.llama_cpp import LlamaCompletionRequest
from quire.server.settings import ServerSettings
from tests.server.conftest import Served, serving
from tests.server.model_directory import write_model
from tests.server.sse import events

FORM = {"Content-Type": "application/x-www-form-urlencoded"}
MARKS = {"[258]": "<|fim_prefix|>", "[259]": "<|fim_suffix|>", "[260]": "<|fim_middle|>", "[261]": "<|file_sep|>"}


async def post(served: Served, path: str, status: int = 200, **fields: Any) -> httpx.Response:
    answer = await served.client.post(path, content=json.dumps(fields), headers=FORM)
    assert answer.status_code == status, answer.text
    return answer


@pytest.fixture(scope="module")
def infilling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has the tokens for infilling."""
    path = write_model(tmp_path_factory.mktemp("models") / "infilling")
    file = path / "tokenizer.json"
    text = file.read_text()
    for filler, mark in MARKS.items():
        text = text.replace(json.dumps(filler), json.dumps(mark))
    file.write_text(text)
    return path


class TestCompletion:
    async def test_a_whole_answer(self, served: Served) -> None:
        answer = (await post(served, "/completion", prompt="=hello")).json()
        assert (answer["content"], answer["stop"], answer["stop_type"]) == ("hello", True, "eos")
        assert (answer["model"], answer["tokens_predicted"], answer["tokens_evaluated"]) == ("tiny", 6, 7)
        assert (answer["tokens"], answer["truncated"], answer["has_new_line"]) == ([], False, False)
        timings = answer["timings"]
        assert timings["cache_n"] + timings["prompt_n"] == 7
        assert timings["predicted_n"] == 6
        assert timings["predicted_per_second"] >= 0

    async def test_a_stream(self, served: Served) -> None:
        text = (await post(served, "/completion", prompt="=abc", stream=True, return_tokens=True)).text
        assert "[DONE]" not in text
        *pieces, last = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
        assert "".join(piece["content"] for piece in pieces) == "abc"
        assert {piece["stop"] for piece in pieces} == {False}
        assert (last["stop"], last["content"]) == (True, "")
        assert len([token for piece in [*pieces, last] for token in piece["tokens"]]) == 4

    async def test_ends(self, served: Served) -> None:
        cut = (await post(served, "/completion", prompt="=abcdef", n_predict=3)).json()
        assert (cut["content"], cut["stop_type"]) == ("abc", "limit")
        word = (await post(served, "/completion", prompt="=abcdef", stop=["d"])).json()
        assert (word["content"], word["stop_type"], word["stopping_word"]) == ("abc", "word", "d")
        endless = (await post(served, "/completion", prompt="x", n_predict=-1)).json()
        assert endless["tokens_evaluated"] + endless["tokens_predicted"] == 256

    def test_the_number_of_drafts(self) -> None:
        request = msgspec.convert({"prompt": "x", "speculative.n_max": 2}, LlamaCompletionRequest)
        assert request.to_completion("x", {}, 100)["num_speculative_tokens"] == 2
        assert "num_speculative_tokens" not in LlamaCompletionRequest(prompt="x").to_completion("x", {}, 100)

    async def test_only_the_prompt(self, served: Served) -> None:
        for stream in (False, True):
            answer = await post(served, "/completion", prompt="=abc", n_predict=0, stream=stream)
            found = events(answer.text)[-1] if stream else answer.json()
            assert (found["content"], found["tokens_predicted"], found["tokens_evaluated"]) == ("", 0, 5)

    async def test_token_ids(self, served: Served) -> None:
        tokens = (await served.client.post("/tokenize", json={"content": "=abc", "add_special": True})).json()["tokens"]
        answer = (await post(served, "/completion", prompt=tokens, return_tokens=True)).json()
        assert answer["content"] == "abc"
        assert len(answer["tokens"]) == answer["tokens_predicted"] == 4

    async def test_a_schema(self, served: Served) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        answer = (await post(served, "/completion", prompt="x", json_schema=schema, n_predict=40)).json()
        assert answer["content"].startswith("{")
        anything = (await post(served, "/completion", prompt="=x", json_schema={}, n_predict=4)).json()
        assert anything["content"][0] in '{["-0123456789tfn \n'

    async def test_a_grammar(self, served: Served) -> None:
        answer = (await post(served, "/completion", prompt="=x", grammar='root ::= "a"{5,5}')).json()
        assert answer["content"] == "aaaaa"

    async def test_fields_that_are_told(self, served: Served) -> None:
        wanted = ["content", "timings/prompt_n", "truncated", "nothing", "content/x"]
        answer = await post(served, "/completion", prompt="=abc", response_fields=wanted)
        assert set(answer.json()) == {"content", "timings/prompt_n", "truncated"}

    async def test_a_time_limit_ends_with_a_line(self, model_path: Path) -> None:
        async with serving(model_path, executor="slow") as served:
            answer = (await post(served, "/completion", prompt="=a\nb\nc\nd", t_max_predict_ms=1)).json()
            assert (answer["content"], answer["stop_type"]) == ("a\n", "limit")
            await served.until_idle()

    def test_defaults_are_the_models_before_llama_cpps(self) -> None:
        plain = LlamaCompletionRequest(prompt="a")
        found = plain.to_completion("a", {"top_k": 20, "min_p": 0.1}, 99)
        assert {name: found.get(name) for name in ("temperature", "top_k", "top_p", "min_p", "max_tokens")} == {
            "temperature": 0.8, "top_k": None, "top_p": 0.95, "min_p": None, "max_tokens": 99,
        }  # fmt: skip
        for seed in (-1, 2**32 - 1):  # both stand for a random one
            given = LlamaCompletionRequest(prompt="a", seed=seed, repeat_penalty=1.1, repeat_last_n=0, temperature=0.0)
            found = given.to_completion("a", {}, 99)
            assert found["temperature"] == 0.0
            assert not {"seed", "repetition_penalty"} & found.keys()

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"grammar": "root ::= (x"}, "grammar"),
            ({"grammar": 'root ::= "a"', "json_schema": {"type": "string"}}, "give grammar or json_schema, not both"),
            ({"mirostat": 2}, "mirostat is not supported"),
            ({"n_probs": 99}, "n_probs=99 asks for 99 alternatives"),
            ({"n_probs": 3, "post_sampling_probs": True}, "post_sampling_probs is not told: the server needs"),
            ({"logit_bias": {"a": 101}}, "logit_bias must be"),
            ({"logit_bias": {"9" * 5000: 1.0}}, "logit_bias"),
            ({"logit_bias": [[10**30, 1.0]]}, "logit_bias"),
            ({"prompt": ""}, "prompt must not be empty"),
            ({"prompt": []}, "prompt must not be empty"),
            ({"prompt": ["a", []]}, "prompt must not be empty"),
            ({"prompt": [1, [2]]}, "prompt must hold token ids and texts, or prompts"),
            ({"prompt": [1, {"prompt_string": "a"}]}, "prompt must hold token ids and texts, or prompts"),
            ({"prompt": {"prompt_string": ""}}, "prompt must not be empty"),
            ({"prompt": {"prompt_string": "a", "multimodal_data": ["b"]}}, "prompt.multimodal_data is not supported"),
            ({"prompt": ["a"] * 65}, "at most 64 prompts"),
            ({"n_predict": "many"}, "n_predict: expected int"),
            ({"speculative.n_max": -1}, "speculative.n_max"),
            ({"temperature": -1}, "temperature must be"),
        ],
    )
    async def test_refused(self, served: Served, fields: dict[str, Any], words: str) -> None:
        error = (await post(served, "/completion", 400, **{"prompt": "a", **fields})).json()["error"]
        assert words in error["message"]
        assert (error["code"], error["type"]) == (400, "invalid_request_error")

    async def test_noted(self, served: Served) -> None:
        answer = await post(served, "/completion", prompt="=a", cache_prompt=True, id_slot=-1, repeat_last_n=64)
        assert answer.headers["x-quire-ignored"] == "cache_prompt, id_slot, repeat_last_n"


class TestTheirTests:
    """What llama.cpp's own tests of these routes look for, texts of its models aside."""

    async def test_completion(self, served: Served) -> None:
        for return_tokens in (False, True):
            answer = (await post(served, "/completion", prompt="=abc", return_tokens=return_tokens)).json()
            assert len(answer["tokens"]) == (4 if return_tokens else 0)
            assert answer["prompt"] == "=abc"
        assert (await post(served, "/completion", prompt="=abc", response_fields=[])).json().keys() == answer.keys()

    async def test_completion_stream(self, served: Served) -> None:
        sent: dict[str, Any] = {"prompt": "=abcdef", "n_predict": 4, "seed": 42, "temperature": 0.5, "stop": ["x"]}
        *pieces, last = events((await post(served, "/completion", stream=True, **sent)).text)
        assert [len(piece["tokens"]) for piece in pieces] == [1, 1, 1, 1]
        settings = last["generation_settings"]
        assert {name: settings[name] for name in ("n_predict", "seed", "temperature", "stop", "stream")} == {
            "n_predict": 4, "seed": 42, "temperature": 0.5, "stop": ["x"], "stream": True,
        }  # fmt: skip
        plain = (await post(served, "/completion", prompt="=a")).json()["generation_settings"]
        assert (plain["seed"], plain["n_predict"], plain["top_k"]) == (2**32 - 1, -1, 40)

    async def test_completion_with_tokens_input(self, served: Served) -> None:
        tokens = (await post(served, "/tokenize", content="=abc", add_special=True)).json()["tokens"]
        both = (await post(served, "/completion", prompt=[tokens, tokens])).json()
        mixed = (await post(served, "/completion", prompt=[tokens, "=abc"])).json()
        assert [each["content"] for each in [*both, *mixed]] == 4 * ["abc"]
        assert [each["index"] for each in mixed] == [0, 1]
        one = (await post(served, "/completion", prompt=["=x", *tokens[2:], "yz"], n_predict=9)).json()
        assert one["content"] == "xabcyz"
        assert (await post(served, "/completion", prompt=["=abc"])).json()["content"] == "abc"

    async def test_n_probs(self, served: Served) -> None:
        sent: dict[str, Any] = {"prompt": "=abcdef", "n_probs": 3, "n_predict": 5}
        whole = (await post(served, "/completion", **sent)).json()["completion_probabilities"]
        *pieces, _ = events((await post(served, "/completion", stream=True, **sent)).text)
        assert [piece["completion_probabilities"] for piece in pieces] == [[each] for each in whole]
        tokens = (await post(served, "/completion", return_tokens=True, **sent)).json()["tokens"]
        assert [each["id"] for each in whole] == tokens
        assert [(each["token"], each["bytes"]) for each in whole] == [(c, [ord(c)]) for c in "abcde"]
        for each in whole:
            assert each["logprob"] <= 0
            assert len(each["top_logprobs"]) == 3
            assert each["top_logprobs"][0] == {name: value for name, value in each.items() if name != "top_logprobs"}

    @pytest.mark.parametrize("form", ["pairs of ids", "pairs of texts", "ids", "texts"])
    async def test_logit_bias(self, served: Served, form: str) -> None:
        [token] = (await post(served, "/tokenize", content="b")).json()["tokens"]
        bias: Any = [[token, 100]] if form == "pairs of ids" else [["b", 100]]
        if form in ("ids", "texts"):
            bias = {str(token) if form == "ids" else "b": 100}
        answer = await post(served, "/completion", prompt="x", logit_bias=bias, n_predict=3, temperature=0)
        assert answer.json()["generation_settings"]["logit_bias"] == [{"token": token, "bias": 100.0}]

    def test_a_bias_of_false(self) -> None:
        assert LlamaCompletionRequest(prompt="a", logit_bias=[(5, False)]).biases == [(5, -100.0)]

    async def test_objects_as_prompts(self, served: Served) -> None:
        text = {"prompt_string": "=abc"}
        assert (await post(served, "/completion", prompt=text)).json()["content"] == "abc"
        tokens = (await post(served, "/tokenize", content="=abc", add_special=True)).json()["tokens"]
        both = (await post(served, "/completion", prompt=[tokens, text])).json()
        assert [each["content"] for each in both] == ["abc", "abc"]

    @pytest.mark.parametrize("form", ["whole", "stream"])
    async def test_a_full_context_truncates(self, served: Served, form: str) -> None:
        for n_predict, truncated in ((8, False), (-1, True)):
            sent: dict[str, Any] = {"prompt": "x", "n_predict": n_predict, "ignore_eos": True}
            answer = await post(served, "/completion", stream=form == "stream", **sent)
            found = events(answer.text)[-1] if form == "stream" else answer.json()
            assert (found["truncated"], found["stop_type"]) == (truncated, "limit")

    async def test_ignore_eos_biases_the_ends(self, served: Served) -> None:
        for ignored in (True, False):
            answer = (await post(served, "/completion", prompt="=abc", ignore_eos=ignored, n_predict=2)).json()
            biases = answer["generation_settings"]["logit_bias"]
            assert [each["bias"] for each in biases] == [None] * len(biases)
            assert bool(biases) is ignored
            assert answer["generation_settings"]["adaptive_target"] == -1.0

    async def test_a_too_long_prompt(self, served: Served) -> None:
        for prompt in ("a" * 300, ["a", "b" * 300], "c" * 100_000):
            error = (await post(served, "/completion", 400, prompt=prompt)).json()["error"]
            assert (error["code"], error["type"]) == (400, "exceed_context_size_error")
            assert (
                f"({error['n_prompt_tokens']} tokens) exceeds the available context size (256 tokens)"
                in error["message"]
            )
            assert (error["n_prompt_tokens"] > 256, error["n_ctx"]) == (True, 256)

    async def test_models(self, served: Served) -> None:
        [found] = (await served.client.get("/models")).json()["data"]
        [plain] = (await served.client.get("/v1/models")).json()["data"]
        assert found == plain | {"aliases": ["tiny"], "tags": []}

    async def test_model_aliases(self, model_path: Path) -> None:
        settings = ServerSettings(served_model_name=["b", "a"])
        async with serving(model_path, settings) as served:
            [found] = (await served.client.get("/models")).json()["data"]
            assert (found["id"], found["aliases"]) == ("b", ["b", "a"])
            assert len((await served.client.get("/v1/models")).json()["data"]) == 2

    async def test_several_prompts_in_a_stream(self, served: Served) -> None:
        prompts = [f"={number}xyz" for number in range(10)]
        found = events((await post(served, "/completion", prompt=prompts, stream=True)).text)
        texts = ["".join(each["content"] for each in found if each["index"] == index) for index in range(10)]
        assert texts == [prompt[1:] for prompt in prompts]
        assert sorted(each["index"] for each in found if each["stop"]) == list(range(10))

    async def test_probabilities_after_sampling(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(llama_cpp, "PROCESSED", "raw_logprobs")  # the executor knows one mode
        sent: dict[str, Any] = {"prompt": "=abcde", "n_probs": 10, "n_predict": 5}
        plain = (await post(served, "/completion", **sent)).json()["completion_probabilities"]
        answer = await post(served, "/completion", post_sampling_probs=True, **sent)
        found = answer.json()["completion_probabilities"]
        assert len(found) == len(plain) == 5
        for each, known in zip(found, plain, strict=True):
            assert each.keys() == {"id", "token", "bytes", "prob", "top_probs"}
            assert each["prob"] == pytest.approx(math.exp(known["logprob"]))
            expected = [math.exp(other["logprob"]) for other in known["top_logprobs"]]
            assert [other["prob"] for other in each["top_probs"]] == pytest.approx(expected)

    async def test_tokenize_with_pieces(self, served: Served) -> None:
        found = (await post(served, "/tokenize", content="ä", with_pieces=True)).json()["tokens"]
        assert [each["piece"] for each in found] == [[0xC3], [0xA4]]


class TestChat:
    """OpenAI's route without /v1."""

    async def test_an_answer(self, served: Served) -> None:
        sent: dict[str, Any] = {"messages": [{"role": "user", "content": "=abc"}], "cache_prompt": True}
        answer = await post(served, "/chat/completions", n_predict=-1, seed=-1, repeat_last_n=64, **sent)
        assert answer.headers["x-quire-ignored"] == "cache_prompt, repeat_last_n"
        found = answer.json()
        assert found["usage"]["completion_tokens"] == found["timings"]["predicted_n"]
        assert found["timings"]["prompt_n"] + found["timings"]["cache_n"] == found["usage"]["prompt_tokens"]
        few = (await post(served, "/chat/completions", n_predict=2, tools=[], tool_choice="auto", **sent)).json()
        assert (few["usage"]["completion_tokens"], few["choices"][0]["finish_reason"]) == (2, "length")
        count = (await post(served, "/chat/completions/input_tokens", messages=sent["messages"])).json()
        assert count["input_tokens"] == few["usage"]["prompt_tokens"]

    @pytest.mark.parametrize("tells_usage", [False, True])
    async def test_a_stream(self, served: Served, tells_usage: bool) -> None:
        sent: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "n": 2, "stream": True}
        options = {"stream_options": {"include_usage": True}} if tells_usage else {}
        *found, end = events((await post(served, "/chat/completions", **sent, **options)).text)
        assert end == "[DONE]"
        begins = [each for each in found if each["choices"] and "role" in each["choices"][0]["delta"]]
        assert [each["choices"][0]["delta"]["content"] for each in begins] == [None, None]
        ends = [each["choices"][0] for each in found if each["choices"] and each["choices"][0]["finish_reason"]]
        assert [(end["finish_reason"], end["delta"]) for end in ends] == 2 * [("length", {})]
        assert ["timings" in each for each in found] == [False] * (len(found) - 1) + [True]
        assert found[-1]["timings"]["predicted_n"] == 8
        assert bool(found[-1]["choices"]) is not tells_usage

    async def test_the_last_tokens_have_log_probabilities_too(self, served: Served) -> None:
        sent: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "logprobs": True}
        sent |= {"grammar": 'root ::= "abcd"', "stop": ["d"]}
        whole = (await post(served, "/chat/completions", **sent)).json()["choices"][0]["logprobs"]["content"]
        chunks = events((await post(served, "/chat/completions", stream=True, **sent)).text)[:-1]
        parts = [each["choices"][0].get("logprobs") for each in chunks]
        assert [each["token"] for each in whole] == ["a", "b", "c", "d"]
        assert [entry for part in parts if part for entry in part["content"]] == whole

    async def test_constraints(self, served: Served) -> None:
        messages = [{"role": "user", "content": "x"}]
        for fields, text in (
            ({"grammar": 'root ::= "a"{5,5}'}, "aaaaa"),
            ({"json_schema": {"const": "42"}}, '"42"'),
            ({"json_schema": {}, "max_tokens": 1}, None),
        ):
            for stream in (False, True):
                answer = await post(served, "/chat/completions", messages=messages, stream=stream, **fields)
                if stream:
                    deltas = [each["choices"][0]["delta"] for each in events(answer.text)[:-1]]
                    found = "".join(delta.get("content") or "" for delta in deltas)
                else:
                    found = answer.json()["choices"][0]["message"]["content"]
                assert found == text if text else found[0] in '{["-0123456789tfn \n'

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"grammar": "root ::= this is (not valid GBNF"}, "grammar"),
            ({"grammar": 'root ::= "a"', "json_schema": {"type": "string"}}, "give grammar or json_schema, not both"),
            ({"grammar": 'root ::= "a"', "guided_regex": "a"}, "not several"),
            ({"mirostat": 2}, "mirostat is not supported"),
            ({"repeat_penalty": -1.0}, "repeat_penalty"),
            ({"n_predict": 0}, "n_predict"),
        ],
    )
    async def test_refused(self, served: Served, fields: dict[str, Any], words: str) -> None:
        messages = [{"role": "user", "content": "x"}]
        error = (await post(served, "/chat/completions", 400, messages=messages, **fields)).json()["error"]
        assert words in error["message"]
        assert (error["code"], error["type"]) == (400, "invalid_request_error")

    async def test_a_too_long_conversation(self, served: Served) -> None:
        for text in ("a" * 300, "b" * 100_000):
            messages = [{"role": "user", "content": text}]
            error = (await post(served, "/chat/completions", 400, messages=messages)).json()["error"]
            assert (error["type"], error["n_ctx"]) == ("exceed_context_size_error", 256)
            assert error["n_prompt_tokens"] > 256


class TestInfill:
    async def test_llama_vim(self, infilling: Path) -> None:
        """The request of its version 0.1, with other files beside the text."""
        fields = {
            "input_prefix": "def f():\n",
            "input_suffix": "\nend\n",
            "input_extra": [{"text": "other", "time": 3, "filename": "a.py"}],
            "prompt": "=abc",
            "n_predict": 128,
            "n_indent": 0,
            "top_k": 40,
            "top_p": 0.99,
            "stream": False,
            "samplers": ["top_k", "top_p", "infill"],
            "cache_prompt": True,
            "t_max_prompt_ms": 500,
            "t_max_predict_ms": 1000,
            "response_fields": ["content", "timings/prompt_n", "timings/predicted_ms", "truncated", "tokens_cached"],
        }
        async with serving(infilling) as served:
            answer = await served.client.post("/infill", json=fields)
            assert answer.status_code == 200, answer.text
            assert answer.json()["content"] == "abc"
            assert set(answer.json()) == set(fields["response_fields"])  # type: ignore[call-overload]
            # The marks, and what the tokenizer puts first.
            whole = (
                await served.client.post("/infill", json=fields | {"response_fields": None, "n_predict": 0})
            ).json()
            texts = "a.py\notherdef f():\n\nend\n=abc"
            assert whole["tokens_evaluated"] == len(texts) + len(MARKS) + 1
            assert whole["content"] == ""

    async def test_a_model_that_does_not_infill(self, served: Served) -> None:
        error = (await post(served, "/infill", 400, input_prefix="a", input_suffix="b")).json()["error"]
        assert error["message"].startswith("input_suffix needs a model that was trained to infill")


class TestState:
    async def test_props_and_slots_tell_no_paths_and_no_prompts(self, live: Served, model_path: Path) -> None:
        props = (await live.client.get("/props")).json()
        assert (props["total_slots"], props["model_path"], props["chat_template"]) == (8, "", "")
        assert props["default_generation_settings"]["n_ctx"] == 256
        assert (props["bos_token"], props["eos_token"]) == ("<|start|>", "<|end|>")
        body = {"prompt": "secret words", "stream": True}
        async with live.client.stream("POST", "/completion", json=body) as answer:
            async for _ in answer.aiter_lines():
                break
            slots = (await live.client.get("/slots")).json()
            assert [slot["is_processing"] for slot in slots] == [True] + 7 * [False]
            assert (await live.client.get("/slots?fail_on_no_slot=1")).status_code == 200
            assert str(model_path) not in json.dumps([props, slots])
            assert "secret" not in json.dumps(slots)
        await live.until_idle()

    async def test_templates_are_told_where_the_settings_say_so(self, model_path: Path) -> None:
        settings = ServerSettings(served_model_name=["tiny"], enable_tokenizer_info_endpoint=True)
        async with serving(model_path, settings) as served:
            assert "add_generation_prompt" in (await served.client.get("/props")).json()["chat_template"]

    async def test_other_routes(self, served: Served) -> None:
        assert (await served.client.get("/v1/health")).json() == {"status": "ok"}
        messages = [{"role": "user", "content": "hi"}]
        for more in ({}, {"tools": []}, {"tools": [], "tool_choice": "auto"}):
            found = (await post(served, "/apply-template", messages=messages, **more)).json()
            assert found == {"prompt": "<|start|>user: hi<|end|><|start|>assistant: "}
        error = (await post(served, "/embedding", 404, content="a")).json()["error"]
        assert (error["code"], error["type"]) == (404, "not_found_error")

    async def test_words_of_both_apis(self, served: Served) -> None:
        tokens = (await served.client.post("/tokenize", json={"content": "ab"})).json()
        assert set(tokens) == {"tokens"}
        pieces = (await served.client.post("/tokenize", json={"content": "ab", "with_pieces": True})).json()["tokens"]
        assert pieces == [{"id": id, "piece": piece} for id, piece in zip(tokens["tokens"], "ab", strict=True)]
        theirs = (await served.client.post("/tokenize", json={"prompt": "ab"})).json()
        assert theirs["tokens"][1:] == tokens["tokens"]
        text = (await served.client.post("/detokenize", json=tokens)).json()
        assert text == {"prompt": "ab", "content": "ab"}
        for path, body in (("/tokenize", {"content": "ab"}), ("/detokenize", tokens)):  # as the manual's curl sends it
            form = {"Content-Type": "application/x-www-form-urlencoded"}
            sent = {"content": json.dumps(body), "headers": form}
            assert (await served.client.post(path, **sent)).status_code == 200
            sent["headers"] = {**form, "Origin": "http://other.example"}
            assert (await served.client.post(path, **sent)).status_code in (403, 415)
        for wrong in ({"content": "a", "prompt": "b"}, {"prompt": "a", "add_special": True}):
            assert (await served.client.post("/tokenize", json=wrong)).status_code == 400


class TestDoor:
    async def test_it_can_be_closed(self, model_path: Path) -> None:
        async with serving(model_path, ServerSettings(served_model_name=["tiny"], api="ollama")) as served:
            for path in ("/completion", "/infill", "/apply-template", "/chat/completions", "/embeddings"):
                assert (await served.client.post(path, json={"prompt": "a"})).status_code == 404
            assert (await served.client.get("/models")).status_code == 404
            assert (await served.client.get("/api/tags")).status_code == 200

    async def test_keys_pages_and_bad_bodies(self, model_path: Path) -> None:
        settings = ServerSettings(served_model_name=["tiny"], api_key=["key"])
        key = {"Authorization": "Bearer key"}
        async with serving(model_path, settings) as served:
            for headers, content, status, kind in (
                ({}, b'{"prompt": "a"}', 401, "authentication_error"),
                ({**key, "Origin": "https://evil.example"}, b'{"prompt": "a"}', 403, "permission_error"),
                ({**key, "Origin": "http://quire"}, b'{"prompt": "a"}', 415, "invalid_request_error"),
                (key, b"{", 400, "invalid_request_error"),
                (key, b'{"prompt": "a", "model": "other"}', 404, "not_found_error"),
            ):
                answer = await served.client.post("/completion", content=content, headers=headers)
                assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
            assert (await served.client.get("/v1/health")).status_code == 200
            assert (await served.client.get("/props")).status_code == 401

    async def test_an_error_amid_a_stream(self, model_path: Path) -> None:
        async with serving(model_path, executor="nonfinite") as served:
            found = events((await post(served, "/completion", prompt="abc?", stream=True)).text)
            assert found[-1]["error"]["type"] == "server_error"
            assert "error" not in found[0]

    async def test_leaving_frees_the_blocks(self, live: Served) -> None:
        async with live.client.stream("POST", "/completion", json={"prompt": "x", "stream": True}) as answer:
            async for _ in answer.aiter_lines():
                break
        await live.until_idle()
