"""Ollama's door, by requests as its clients send them (the official ones: benchmarks/clients)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.errors import ConfigError, UserError
from quire.server.ollama import tagged
from quire.server.protocol.ollama import OllamaChatRequest, OllamaOptions
from quire.server.settings import ServerSettings
from tests.server.conftest import Served, serving

FORM = {"Content-Type": "application/x-www-form-urlencoded"}
THINKING = "{# <think> <tool_call> #}" + (
    "{% if enable_thinking is defined %}thinks {{ enable_thinking }} {% endif %}"
    "{% for message in messages %}<|start|>{{ message.role }}: {{ message.content }}"
    "{% if not loop.last or message.role != 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)


def says(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"={text}"}]


async def chat(served: Served, text: str = "hello", **fields: Any) -> list[dict[str, Any]]:
    """The lines of the answer."""
    body = {"model": "tiny", "messages": says(text), **fields}
    answer = await served.client.post("/api/chat", content=json.dumps(body), headers=FORM)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


@pytest.fixture
async def thinker(model_path: Path) -> AsyncIterator[Served]:
    settings = ServerSettings(served_model_name=["tiny"], reasoning_parser="auto")
    async with serving(model_path, settings, chat_template=THINKING) as served:
        yield served


class TestChat:
    async def test_it_streams_unless_told_not_to(self, served: Served) -> None:
        *pieces, last = await chat(served, "hello")
        assert "".join(line["message"]["content"] for line in pieces) == "hello"
        assert {line["done"] for line in pieces} == {False}
        assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
        [whole] = await chat(served, "hello", stream=False)
        assert whole["message"] == {"role": "assistant", "content": "hello"}
        assert (whole["model"], whole["eval_count"], whole["load_duration"]) == ("tiny", 6, 0)
        assert whole["prompt_eval_count"] == last["prompt_eval_count"] > 6
        assert whole["total_duration"] >= whole["eval_duration"] > 0 < whole["prompt_eval_duration"]

    async def test_the_stream_is_lines_of_json(self, served: Served) -> None:
        answer = await served.client.post("/api/chat", json={"model": "tiny", "messages": says("ab")})
        assert answer.headers["content-type"] == "application/x-ndjson"
        assert answer.text.endswith("}\n")

    async def test_num_predict(self, served: Served) -> None:
        [cut] = await chat(served, "abcdef", stream=False, options={"num_predict": 3})
        assert (cut["message"]["content"], cut["done_reason"]) == ("abc", "length")
        for endless in (-1, -2, 0):
            [whole] = await chat(served, "abcdef", stream=False, options={"num_predict": endless})
            assert (whole["message"]["content"], whole["done_reason"]) == ("abcdef", "stop")

    async def test_more_tokens_than_fit_end_with_the_context(self, served: Served) -> None:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": False}
        for options in ({"num_predict": 10_000}, {}):
            answer = (await served.client.post("/api/chat", json=body | {"options": options})).json()
            assert answer["prompt_eval_count"] + answer["eval_count"] == 256
            assert answer["done_reason"] == "length"

    async def test_options(self, served: Served) -> None:
        [found] = await chat(served, "abcdef", stream=False, options={"stop": ["d"], "seed": 3, "temperature": 0})
        assert (found["message"]["content"], found["done_reason"]) == ("abc", "stop")
        body = {"model": "tiny", "messages": says("a"), "options": {"temperature": -1}}
        answer = await served.client.post("/api/chat", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"].startswith("options.temperature must be")

    @pytest.mark.parametrize("name", ["m", "m:latest"])
    async def test_a_name_has_a_tag_or_none(self, model_path: Path, name: str) -> None:
        for served_name in ("m", "m:latest"):
            async with serving(model_path, ServerSettings(served_model_name=[served_name])) as served:
                [answer] = await chat(served, "a", model=name, stream=False)
                assert answer["model"] == name
                fields = {"model": name, "messages": says("a")}
                assert (await served.client.post("/v1/chat/completions", json=fields)).json()["model"] == served_name

    async def test_another_model_is_404(self, served: Served) -> None:
        for path in ("/api/chat", "/api/generate", "/api/show", "/api/pull", "/api/embed"):
            answer = await served.client.post(path, json={"model": "other", "messages": says("a"), "input": "a"})
            assert answer.status_code == 404, path
            assert set(answer.json()) == {"error"}
        assert (
            "'other' does not exist" in answer.json()["error"] or "needs a model that pools" in answer.json()["error"]
        )

    async def test_the_beginning_of_the_answer(self, served: Served) -> None:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "=xyz"}]
        [answer] = await chat(served, messages=messages, stream=False)
        assert answer["message"]["content"] == "xyz"

    async def test_no_messages_load_the_model(self, served: Served) -> None:
        for fields in ({"messages": []}, {"messages": None}, {"messages": [], "keep_alive": 0}):
            [answer] = await chat(served, **fields)
            assert (answer["done"], answer["done_reason"]) == (True, "load")
            assert answer["message"]["content"] == ""

    async def test_format(self, served: Served) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        for form in ("json", schema):
            lines = await chat(served, "x", format=form, options={"num_predict": 40})
            text = "".join(line["message"]["content"] for line in lines)
            assert text.startswith("{")
        body = {"model": "tiny", "messages": says("a"), "format": "xml"}
        assert "format must be" in (await served.client.post("/api/chat", json=body)).json()["error"]
        [anything] = await chat(served, "x", format={}, options={"num_predict": 4}, stream=False)
        assert anything["message"]["content"][0] in '{["-0123456789tfn \n'
        assert (await chat(served, "abc", format="", stream=False))[0]["message"]["content"] == "abc"

    async def test_log_probabilities(self, served: Served) -> None:
        lines = await chat(served, "ab", logprobs=True, top_logprobs=2)
        entries = [entry for line in lines for entry in line.get("logprobs", [])]
        assert [entry["token"] for entry in entries][:2] == ["a", "b"]
        assert {len(entry["top_logprobs"]) for entry in entries} == {2}
        [whole] = await chat(served, "ab", logprobs=True, stream=False)
        assert [entry["token"] for entry in whole["logprobs"]][:2] == ["a", "b"]


class TestThoughtsAndCalls:
    async def test_thoughts_have_a_field(self, thinker: Served) -> None:
        lines = await chat(thinker, "<think>hm</think>yes", think=True)
        assert "".join(line["message"].get("thinking", "") for line in lines) == "hm"
        assert "".join(line["message"]["content"] for line in lines) == "yes"
        lines = await chat(thinker, "<think>hm</think>yes", think=True, logprobs=True)
        [whole] = await chat(thinker, "<think>hm</think>yes", think=True, logprobs=True, stream=False)
        assert [entry["token"] for entry in whole["logprobs"]] == [*"hmyes"]
        assert [entry for line in lines for entry in line.get("logprobs", [])] == whole["logprobs"]
        [whole] = await chat(thinker, "<think>hm</think>yes", think="high", stream=False)
        assert (whole["message"]["thinking"], whole["message"]["content"]) == ("hm", "yes")

    async def test_think_is_given_to_the_template(self, thinker: Served) -> None:
        async def prompt_tokens(**fields: Any) -> int:
            return (await chat(thinker, "a", stream=False, **fields))[0]["prompt_eval_count"]

        plain = await prompt_tokens()
        assert await prompt_tokens(think=True) - plain == len("thinks True ")
        assert await prompt_tokens(think=False) - plain == len("thinks False ")

    async def test_a_model_whose_thoughts_are_not_known(self, served: Served) -> None:
        answer = await served.client.post("/api/chat", json={"model": "tiny", "messages": says("a"), "think": True})
        assert answer.status_code == 400
        assert answer.json()["error"].startswith("'tiny' does not support thinking")
        [fine] = await chat(served, "a", think=False, stream=False)
        assert fine["message"]["content"] == "a"

    async def test_arguments_of_calls_are_objects(self, thinker: Served) -> None:
        text = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
        tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
        *pieces, last = await chat(thinker, text, tools=tools)
        [call] = [call for line in pieces for call in line["message"].get("tool_calls", [])]
        assert call["function"] == {"name": "add", "arguments": {"x": 1}, "index": 0}
        assert last["done_reason"] == "stop"
        [whole] = await chat(thinker, text, tools=tools, stream=False)
        assert [each["function"] for each in whole["message"]["tool_calls"]] == [call["function"]]

    def test_results_belong_to_calls(self) -> None:
        def call(name: str, **more: Any) -> dict[str, Any]:
            return {"function": {"name": name, "arguments": {"x": 1}}, **more}

        def result(**more: Any) -> dict[str, Any]:
            return {"role": "tool", "content": "r", **more}

        messages = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "tool_calls": [call("a"), call("b"), call("a")], "thinking": "hm"},
            result(tool_name="b"),
            result(tool_name="a"),
            result(),
            {"role": "assistant", "content": "so", "tool_calls": [call("c", id="mine")]},
            result(tool_call_id="mine"),
        ]
        found = msgspec.convert({"model": "m", "messages": messages}, OllamaChatRequest).chat_messages
        assert [each.get("tool_call_id") for each in found if each["role"] == "tool"] == [
            "call00002", "call00001", "call00003", "mine",
        ]  # fmt: skip
        assert [each.get("name") for each in found if each["role"] == "tool"] == ["b", "a", "a", "c"]
        assert found[1]["reasoning"] == "hm"
        assert found[1]["tool_calls"][0]["function"] == {"name": "a", "arguments": {"x": 1}}


class TestGenerate:
    async def post(self, served: Served, **fields: Any) -> dict[str, Any]:
        body = {"model": "tiny", "stream": False, **fields}
        answer = await served.client.post("/api/generate", content=json.dumps(body), headers=FORM)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def test_a_prompt_is_a_conversation(self, served: Served) -> None:
        whole = await self.post(served, prompt="=hello", system="be brief")
        assert (whole["response"], whole["done_reason"]) == ("hello", "stop")
        raw = await self.post(served, prompt="=hello", raw=True, options={"num_predict": 3})
        assert (raw["response"], raw["done_reason"]) == ("hel", "length")
        assert whole["prompt_eval_count"] > raw["prompt_eval_count"] == len("=hello") + 1
        assert "message" not in whole

    async def test_a_stream(self, served: Served) -> None:
        for raw in (True, False):
            body = {"model": "tiny", "prompt": "=abc", "raw": raw, "options": {"num_predict": 3}}
            answer = await served.client.post("/api/generate", json=body)
            lines = [json.loads(line) for line in answer.text.splitlines()]
            assert "".join(line["response"] for line in lines) == "abc"
            assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]

    async def test_raw_ends_with_the_context(self, served: Served) -> None:
        whole = await self.post(served, prompt="x", raw=True)
        assert whole["prompt_eval_count"] + whole["eval_count"] == 256
        assert whole["done_reason"] == "length"

    async def test_log_probabilities_without_a_template(self, served: Served) -> None:
        whole = await self.post(served, prompt="=ab", raw=True, logprobs=True, top_logprobs=1)
        assert [entry["token"] for entry in whole["logprobs"]][:2] == ["a", "b"]

    async def test_no_prompt_loads_the_model(self, served: Served) -> None:
        assert (await self.post(served))["done_reason"] == "load"
        assert (await self.post(served, prompt="", keep_alive="5m"))["response"] == ""

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"suffix": "x"}, "suffix needs a model that was trained to infill"),
            ({"template": "{{ .Prompt }}"}, "template is not supported"),
            ({"context": [1, 2]}, "context is not supported"),
            ({"raw": True, "system": "s"}, "system is only allowed without raw"),
            ({"images": ["iVBO"]}, "images are not supported: prompts are text"),
            ({"options": {"mirostat": 2}}, "options.mirostat is not supported"),
            ({"options": {"num_predict": "many"}}, "options.num_predict: expected int"),
            ({"options": {"temperatur": 1}}, "did you mean 'temperature'"),
        ],
    )
    async def test_refused(self, served: Served, fields: dict[str, Any], words: str) -> None:
        answer = await served.client.post("/api/generate", json={"model": "tiny", "prompt": "a", **fields})
        assert answer.status_code == 400
        assert words in answer.json()["error"]


class TestFields:
    async def test_noted_fields_are_reported(self, served: Served) -> None:
        options = {"num_ctx": 4096, "num_gpu": 99, "repeat_penalty": 1.1, "repeat_last_n": 64, "colour": 1}
        body = {"model": "tiny", "messages": says("a"), "keep_alive": "5m", "options": options, "stream": False}
        answer = await served.client.post("/api/chat", json=body)
        assert answer.status_code == 200
        assert answer.headers["x-quire-ignored"].split(", ") == [
            "keep_alive", "options.colour", "options.num_ctx", "options.num_gpu", "options.repeat_last_n",
        ]  # fmt: skip

    def test_defaults_are_the_models_before_ollamas(self) -> None:
        assert OllamaOptions().sampling({}, 99) == {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "max_tokens": 99}
        assert OllamaOptions().sampling({"top_k": 20, "temperature": 0.6}, 9) == {"top_p": 0.9, "max_tokens": 9}
        given = OllamaOptions(temperature=0.0, seed=-1, repeat_penalty=1.1, repeat_last_n=0, num_predict=4)
        assert given.sampling({"top_k": 1, "top_p": 1}, 9) == {"temperature": 0.0, "max_tokens": 4}

    async def test_a_large_body_is_read_in_the_helper(self, served: Served) -> None:
        messages = [{"role": "user", "content": "x" * 2**20}, *says("a")]
        answer = await served.client.post("/api/chat", json={"model": "tiny", "messages": messages})
        assert answer.status_code == 400
        assert "context" in answer.json()["error"]


class TestModels:
    async def test_what_is_listed(self, served: Served) -> None:
        [model] = (await served.client.get("/api/tags")).json()["models"]
        assert (model["name"], model["model"]) == ("tiny:latest", "tiny:latest")
        assert (model["details"]["family"], model["details"]["format"]) == ("llama", "safetensors")
        assert len(model["digest"]) == 64
        [running] = (await served.client.get("/api/ps")).json()["models"]
        assert (running["digest"], running["context_length"], running["size_vram"]) == (model["digest"], 256, 0)

    async def test_show(self, served: Served, thinker: Served) -> None:
        for field in ("model", "name"):
            info = (await served.client.post("/api/show", json={field: "tiny:latest"})).json()
        assert info["capabilities"] == ["completion"]
        assert info["model_info"]["llama.context_length"] == 256
        assert info["model_info"]["general.architecture"] == "llama"
        assert info["template"] == "{{ .System }}{{ .Prompt }}"
        able = (await thinker.client.post("/api/show", json={"model": "tiny"})).json()
        assert able["capabilities"] == ["completion", "tools", "thinking"]
        assert ".Tools" in able["template"]

    def test_tags_of_names(self) -> None:
        assert [tagged(name) for name in ("m", "org/m", "m:4b", "host:1/m")] == [
            "m:latest", "org/m:latest", "m:4b", "host:1/m:latest",
        ]  # fmt: skip

    async def test_pull_of_the_served_model(self, served: Served) -> None:
        answer = await served.client.post("/api/pull", json={"model": "tiny"})
        assert json.loads(answer.text.splitlines()[-1]) == {"status": "success"}
        whole = await served.client.post("/api/pull", json={"name": "tiny", "stream": False, "insecure": True})
        assert whole.json() == {"status": "success"}

    async def test_models_are_not_changed(self, served: Served) -> None:
        for method, path in (
            ("POST", "/api/create"),
            ("POST", "/api/copy"),
            ("POST", "/api/push"),
            ("DELETE", "/api/delete"),
            ("POST", "/api/blobs/sha256:00"),
        ):
            answer = await served.client.request(method, path, json={"model": "tiny"})
            assert answer.status_code == 403, path
            assert "the one that it was started with" in answer.json()["error"]

    async def test_the_version_and_the_greeting(self, served: Served) -> None:
        version = (await served.client.get("/api/version")).json()["version"]
        assert tuple(map(int, version.split("."))) >= (0, 6, 4)
        assert (await served.client.get("/")).text == "Ollama is running"
        assert (await served.client.head("/")).status_code == 200
        page = await served.client.get("/", headers={"Accept": "text/html"})
        assert page.headers["content-type"].startswith("text/html")


class TestDoor:
    async def test_it_can_be_closed(self, model_path: Path) -> None:
        async with serving(model_path, ServerSettings(served_model_name=["tiny"], api="none")) as served:
            assert (await served.client.get("/api/tags")).status_code == 404
            assert (await served.client.get("/")).headers["content-type"].startswith("text/html")
        for wrong in ("olama", "ollama,none", ""):
            with pytest.raises(ConfigError) as caught:
                ServerSettings(api=wrong)
            assert caught.value.param == "api"

    async def test_pages_send_json(self, model_path: Path) -> None:
        """Without an Origin any type is JSON, as Ollama's manual has it; with one, a form would need no preflight."""
        settings = ServerSettings(served_model_name=["tiny"], cors_allowed_origins=["app://*", "vscode-webview://*"])
        body = json.dumps({"model": "tiny", "messages": says("a"), "stream": False})
        async with serving(model_path, settings) as served:
            for origin, kind, status in (
                (None, "text/plain", 200),
                ("app://obsidian.md", "application/json", 200),
                ("vscode-webview://0abc", "application/json", 200),
                ("app://obsidian.md", "text/plain", 415),
                ("http://quire", "text/plain", 415),
                ("https://evil.example", "application/json", 403),
                ("null", "text/plain", 403),
                ("xapp://a", "application/json", 403),
            ):
                headers = {"Content-Type": kind, **({} if origin is None else {"Origin": origin})}
                answer = await served.client.post("/api/chat", content=body, headers=headers)
                assert answer.status_code == status, (origin, kind, answer.text)
                assert ("error" in answer.json()) == (status != 200)
                if origin is not None and origin.startswith(("app:", "vscode")):
                    assert answer.headers["access-control-allow-origin"] == origin
            plain = await served.client.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"})
            assert plain.status_code == 415

    async def test_keys(self, model_path: Path) -> None:
        settings = ServerSettings(served_model_name=["tiny"], api_key=["key"])
        async with serving(model_path, settings) as served:
            for path in ("/api/chat", "/api/show"):
                missing = await served.client.post(path, json={"model": "tiny"})
                assert (missing.status_code, set(missing.json())) == (401, {"error"})
            assert (await served.client.get("/api/tags")).status_code == 401
            assert (await served.client.get("/api/version")).status_code == 200
            right = await served.client.get("/api/tags", headers={"Authorization": "Bearer key"})
            assert right.status_code == 200

    @pytest.mark.parametrize("content", [b"{", b"", b"[]", b"a=b", b'{"model": 1}', b'{"messages": []}'])
    async def test_bad_bodies(self, served: Served, content: bytes) -> None:
        answer = await served.client.post("/api/chat", content=content)
        assert answer.status_code == 400
        assert isinstance(answer.json()["error"], str)

    async def test_an_error_amid_a_stream(self, model_path: Path) -> None:
        async with serving(model_path, executor="nonfinite") as served:
            body = {"model": "tiny", "prompt": "abc?", "raw": True}
            answer = await served.client.post("/api/generate", json=body)
            lines = [json.loads(line) for line in answer.text.splitlines()]
            assert answer.status_code == 200
            assert "error" not in lines[0]
            assert set(lines[-1]) == {"error"}

    async def test_a_prompt_that_is_too_long_is_no_stream(self, served: Served) -> None:
        answer = await served.client.post("/api/chat", json={"model": "tiny", "messages": says("a" * 300)})
        assert answer.status_code == 400
        assert "context" in answer.json()["error"]

    async def test_leaving_frees_the_blocks(self, live: Served) -> None:
        body = {"model": "tiny", "messages": says("a" * 99)}
        async with live.client.stream("POST", "/api/chat", json=body) as answer:
            async for line in answer.aiter_lines():
                assert not json.loads(line)["done"]
                break
        await live.until_idle()
        whole = asyncio.ensure_future(live.client.post("/api/chat", json={**body, "stream": False}))
        await live.until_running(1)
        whole.cancel()
        await live.until_idle()

    async def test_limits(self, model_path: Path) -> None:
        settings = ServerSettings(served_model_name=["tiny"], max_body_size=1000)
        async with serving(model_path, settings) as served:
            answer = await served.client.post("/api/chat", content=b"x" * 2000)
            assert (answer.status_code, set(answer.json())) == (413, {"error"})


class TestClients:
    """Requests as other programs make them."""

    async def test_open_webui(self, thinker: Served) -> None:
        assert (await thinker.client.get("/api/version")).json()["version"]
        [model] = (await thinker.client.get("/api/tags")).json()["models"]
        options = {"temperature": 0.7, "num_ctx": 8192, "num_predict": 128, "seed": 3, "stop": [], "top_k": 20}
        body = {
            "model": model["model"],
            "messages": [{"role": "system", "content": "be brief"}, *says("hi")],
            "options": options,
            "keep_alive": "10m",
            "format": "",
            "tools": [],
            "stream": True,
        }
        answer = await thinker.client.post("/api/chat", json=body)
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert "".join(line["message"]["content"] for line in lines) == "hi"
        last = lines[-1]
        assert last["eval_count"] / last["eval_duration"] > 0
        unload = await thinker.client.post(
            "/api/generate", json={"model": "tiny:latest", "keep_alive": 0, "prompt": ""}
        )
        assert unload.json()["done"]

    async def test_continue(self, served: Served) -> None:
        info = (await served.client.post("/api/show", json={"name": "tiny"})).json()
        assert isinstance(info["parameters"], str)
        assert ".Suffix" not in info["template"]
        options = {"temperature": 0.01, "top_p": 0.9, "num_predict": 2, "stop": ["\n"], "num_ctx": 4096}
        body = {"model": "tiny", "prompt": "=abc", "raw": True, "options": options, "keep_alive": 1800, "stream": True}
        answer = await served.client.post("/api/generate", json=body)
        assert "".join(json.loads(line)["response"] for line in answer.text.splitlines()) == "ab"

    async def test_zed(self, thinker: Served) -> None:
        info = (await thinker.client.post("/api/show", json={"model": "tiny:latest"})).json()
        assert {"tools", "thinking"} <= set(info["capabilities"])
        assert info["model_info"][info["model_info"]["general.architecture"] + ".context_length"] == 256
        call = {"function": {"name": "read", "arguments": {"path": "a"}}}
        messages = [
            {"role": "user", "content": "read", "images": None},
            {"role": "assistant", "content": "", "tool_calls": [call], "images": None, "thinking": None},
            {"role": "tool", "tool_name": "read", "content": "text"},
            {**says("ok")[0], "images": None},
        ]
        tool = {"type": "function", "function": {"name": "read", "description": None, "parameters": {}}}
        options = {"num_ctx": 256, "num_predict": None, "stop": [], "temperature": 1.0, "top_p": None}
        body = {"model": "tiny:latest", "messages": messages, "stream": True, "keep_alive": -1, "options": options}
        answer = await thinker.client.post("/api/chat", json=body | {"tools": [tool], "think": None})
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert "".join(line["message"]["content"] for line in lines) == "ok"
        assert lines[-1]["prompt_eval_count"] > 0

    async def test_copilot(self, thinker: Served) -> None:
        """It asks Ollama's routes for models, and OpenAI's for answers, under the name that the former tell."""
        [model] = (await thinker.client.get("/api/tags")).json()["models"]
        info = (await thinker.client.post("/api/show", json={"model": model["model"]})).json()
        assert info["model_info"]["general.basename"] == "tiny"
        body = {"model": model["model"], "messages": says("hi"), "stream": False}
        answer = (await thinker.client.post("/v1/chat/completions", json=body)).json()
        assert answer["choices"][0]["message"]["content"] == "hi"


def test_a_struct_names_the_field_that_is_wrong() -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({"model": "m", "top_logprobs": 2}, OllamaChatRequest)
    assert isinstance(caught.value.__cause__, UserError)
    assert caught.value.__cause__.param == "top_logprobs"
