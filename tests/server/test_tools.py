"""Tools and reasoning over HTTP: a fake model says what stands behind "=" in the prompt, so every answer is exact."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from quire.errors import ConfigError
from quire.server.settings import ServerSettings
from tests.server.conftest import Served, serving
from tests.server.model_directory import write_model
from tests.server.sse import chunks

TEMPLATE = (
    "{# <tool_call> #}{# <think> #}"
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for message in messages %}<|start|>{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: "
    "{% if thinking is defined %}{{ '<think>\n' if thinking else '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
CALLS = CALL + '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>hm</think>"


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tools", TEMPLATE, 512)


pytestmark = pytest.mark.asyncio(loop_scope="module")


SETTINGS = ServerSettings(served_model_name=["tiny"], reasoning_parser="auto")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tool_model: Path) -> AsyncIterator[Served]:
    async with serving(tool_model, SETTINGS) as served:
        yield served


def body(says: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "=" + says}], "tools": [WEATHER, TIME], **more}


async def ask(served: Served, says: str, **more: Any) -> dict[str, Any]:
    response = await served.client.post("/v1/chat/completions", json=body(says, **more))
    assert response.status_code == 200, response.text
    return response.json()


async def error(served: Served, **more: Any) -> str:
    response = await served.client.post("/v1/chat/completions", json=body("x", **more))
    assert response.status_code == 400, response.text
    return response.json()["error"]["message"]


async def streamed(served: Served, says: str, **more: Any) -> tuple[list[Any], dict[int, dict[str, Any]]]:
    """The chunks, and the messages that they make."""
    response = await served.client.post("/v1/chat/completions", json=body(says, stream=True, **more))
    assert response.status_code == 200, response.text
    found = chunks(response.text)
    messages: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in found for choice in chunk["choices"]):
        message = messages.setdefault(choice["index"], {"content": "", "reasoning": "", "calls": []})
        delta = choice["delta"]
        assert delta.get("reasoning") == delta.get("reasoning_content")
        message["content"] += delta.get("content", "")
        message["reasoning"] += delta.get("reasoning", "")
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                assert piece["type"] == "function"
                assert piece["index"] == len(message["calls"])
                message["calls"].append([piece["function"]["name"], ""])
            message["calls"][piece["index"]][1] += piece["function"].get("arguments", "")
        if choice["finish_reason"] is not None:
            message["finish_reason"] = choice["finish_reason"]
    return found, messages


async def test_a_call(served: Served) -> None:
    answer = await ask(served, "Look.\n" + CALLS)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Look.\n"
    ids = [call.pop("id") for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(re.fullmatch("chatcmpl-tool-[0-9a-f]{32}", call_id) for call_id in ids)
    assert message["tool_calls"] == [
        {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}},
        {"type": "function", "function": {"name": "get_time", "arguments": "{}"}},
    ]
    assert (await ask(served, CALL))["choices"][0]["message"]["content"] is None


async def test_readings_of_the_tool_parser_are_counted(tool_model: Path) -> None:
    """By route, by mode, and by whether there was a call; of a stream each piece."""
    async with serving(tool_model, SETTINGS) as fresh:  # it has counted nothing
        name = "vllm:tool_call_parser_invocations_total"

        async def counted() -> dict[tuple[str, str, str], float]:
            families = text_string_to_metric_families((await fresh.client.get("/metrics")).text)
            samples = (sample for family in families for sample in family.samples if sample.name == name)
            keys = ("request_type", "mode", "outcome")
            return {tuple(each.labels[key] for key in keys): each.value for each in samples if each.value}  # type: ignore[misc]

        await ask(fresh, CALL, n=2)
        await ask(fresh, "No.")
        await ask(fresh, CALL, tool_choice="none")
        function = {"type": "function", **WEATHER["function"]}
        await fresh.client.post("/v1/responses", json={"model": "tiny", "input": "=" + CALL, "tools": [function]})
        expected = {
            ("chat_completions", "non_streaming", "tool_call"): 2,
            ("chat_completions", "non_streaming", "no_tool_call"): 1,
            ("responses", "non_streaming", "tool_call"): 1,
        }
        assert await counted() == expected
        await streamed(fresh, "No. " + CALL)
        assert (await counted()).keys() - expected.keys() == {
            ("chat_completions", "streaming", "tool_call"),
            ("chat_completions", "streaming", "no_tool_call"),
        }


async def test_a_streamed_call_beside_others(served: Served) -> None:
    """n > 1: each choice has parsers of its own, and its pieces are the whole answer's."""
    found, messages = await streamed(served, THOUGHT + CALLS, n=2)
    for index in (0, 1):
        assert messages[index] == {
            "content": "",
            "reasoning": "hm",
            "calls": [["get_weather", '{"city": "Köln"}'], ["get_time", "{}"]],
            "finish_reason": "tool_calls",
        }
    names = [
        delta["tool_calls"][0] for chunk in found for c in chunk["choices"] if (delta := c["delta"]).get("tool_calls")
    ]
    first = next(piece for piece in names if piece["index"] == 0)
    assert set(first) == {"index", "id", "type", "function"}
    assert first["function"]["name"] == "get_weather"
    # How many pieces the arguments come in depends on how often the event loop runs: tests/parsers counts them.


async def test_what_ends_a_call(served: Served) -> None:
    """A length, a stop string, and a model that goes on with text: the reason says which."""
    answer = await ask(served, CALL, max_tokens=52)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    assert '{"city": "Köln"}'.startswith(call["function"]["arguments"])
    assert call["function"]["arguments"]
    _, messages = await streamed(served, CALL, max_tokens=52)
    assert messages[0]["calls"] == [[call["function"]["name"], call["function"]["arguments"]]]
    assert messages[0]["finish_reason"] == "length"
    [choice] = (await ask(served, CALL, stop=["Kö"]))["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "Kö")
    [choice] = (await ask(served, "<tool_call> is not called", n=1))["choices"]
    assert choice["message"]["content"] == "<tool_call> is not called"
    assert choice["finish_reason"] == "stop"


async def test_no_calls(served: Served) -> None:
    """Without tools, or with tool_choice none, the text of a call is content."""
    for more in ({"tools": None}, {"tools": None, "tool_choice": "none"}, {"tool_choice": "none"}):
        [choice] = (await ask(served, CALL, **more))["choices"]
        assert choice["message"]["content"] == CALL
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


async def test_what_the_template_gets(served: Served, tool_model: Path) -> None:
    async def prompt(server: Served, **more: Any) -> str:
        answer = await ask(server, "x", return_token_ids=True, **more)
        return server.context.tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)

    assert (await prompt(served)).startswith("get_weather get_time <|start|>user")
    assert (await prompt(served, tool_choice="none")).startswith("get_weather get_time <|start|>user")
    allowed = {"type": "allowed_tools", "allowed_tools": {"tools": [{"function": {"name": "get_time"}}]}}
    assert (await prompt(served, tool_choice=allowed)).startswith("get_time <|start|>user")
    async with serving(tool_model, ServerSettings(exclude_tools_when_tool_choice_none=True)) as excluding:
        assert (await prompt(excluding, tool_choice="none")).startswith("<|start|>user")


async def test_one_call_at_a_time(served: Served) -> None:
    [choice] = (await ask(served, CALLS, parallel_tool_calls=False))["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    assert choice["finish_reason"] == "tool_calls"


async def test_required_calls(served: Served) -> None:
    """The answer is held to a list of calls, whatever the model would say."""
    says = '[{"name": "get_weather", "parameters": {"city": "Rom"}}]'
    [choice] = (await ask(served, says, tool_choice="required"))["choices"]
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Rom"}'}
    assert choice["finish_reason"] == "tool_calls"
    _, messages = await streamed(served, says, tool_choice="required")
    assert messages[0]["calls"] == [["get_weather", '{"city": "Rom"}']]
    _, messages = await streamed(
        served, "no calls at all, as the model wants it", tool_choice="required", max_tokens=60
    )
    assert messages[0]["content"] == ""


async def test_a_call_by_name(served: Served) -> None:
    chosen = {"type": "function", "function": {"name": "get_weather"}}
    [choice] = (await ask(served, '{"city": "Rom"}', tool_choice=chosen))["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Rom"}'}
    assert choice["finish_reason"] == "stop", "as OpenAI and vLLM say it"
    _, messages = await streamed(served, '{"city": "Rom"}', tool_choice=chosen)
    assert messages[0]["calls"] == [["get_weather", '{"city": "Rom"}']]


async def test_reasoning(served: Served) -> None:
    answer = await ask(served, "<think>two words</think>Yes.")
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == (
        "Yes.",
        "two words",
        "two words",
    )
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("two words")}
    answer = await ask(served, "two words</think>Yes.", chat_template_kwargs={"thinking": True})
    assert answer["choices"][0]["message"]["reasoning"] == "two words"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("two words")}
    answer = await ask(served, "Yes.", chat_template_kwargs={"thinking": False})
    assert answer["choices"][0]["message"]["content"] == "Yes."
    answer = await ask(served, "<think>never ends", max_tokens=12)
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == (None, "never")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}


async def test_reasoning_can_be_left_out(served: Served) -> None:
    answer = await ask(served, "<think>a</think>b", include_reasoning=False)
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("b", None, None)
    _, messages = await streamed(served, "<think>a</think>b", include_reasoning=False)
    assert (messages[0]["content"], messages[0]["reasoning"]) == ("b", "")


async def test_tokens_are_told_though_no_text_is(served: Served) -> None:
    """Log-probabilities and token ids come with every chunk, also of markers."""
    found, _ = await streamed(served, THOUGHT + CALL, logprobs=True, return_token_ids=True)
    ids = [each for chunk in found for c in chunk["choices"] for each in c.get("token_ids", ())]
    assert len(ids) == len((THOUGHT + CALL).encode()) + 1
    logprobs = [c["logprobs"] for chunk in found for c in chunk["choices"] if c["logprobs"]]
    assert sum(len(entry["content"]) for entry in logprobs) == len(ids)


STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}


def call_of(message: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    [call] = message["tool_calls"]
    return call["function"]["name"], json.loads(call["function"]["arguments"])


async def test_strict_tools(served: Served) -> None:
    """Behind the mark of a call its arguments follow the schema, whatever the model would write; other text is free, in
    thoughts as well."""
    tools = [STRICT, TIME]
    wrong = CALL.replace('"city"', '"town"')
    message = (await ask(served, "Look. " + wrong, tools=tools, max_tokens=150))["choices"][0]["message"]
    assert message["content"] == "Look. "
    assert message["tool_calls"][0]["function"]["name"] == "get_weather"
    assert message["tool_calls"][0]["function"]["arguments"].startswith('{"city": ')
    loose = (await ask(served, wrong))["choices"][0]["message"]
    assert call_of(loose) == ("get_weather", {"town": "Köln"})
    answer = await ask(served, THOUGHT + CALLS, tools=tools)
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == "hm"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather", "get_time"]
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    message = (await ask(served, "no call", tools=tools))["choices"][0]["message"]
    assert (message["content"], message.get("tool_calls")) == ("no call", None)
    says = f"see {wrong}</think>" + CALL
    message = (await ask(served, says, tools=tools, chat_template_kwargs={"thinking": True}))["choices"][0]["message"]
    assert message["reasoning"] == f"see {wrong}"
    assert call_of(message) == ("get_weather", {"city": "Köln"})


async def test_a_strict_answer_ends_with_the_one_call_that_it_may_have(served: Served) -> None:
    answer = await ask(served, CALLS, tools=[STRICT, TIME], parallel_tool_calls=False)
    assert call_of(answer["choices"][0]["message"]) == ("get_weather", {"city": "Köln"})
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    loose = await ask(served, CALLS, parallel_tool_calls=False)
    assert answer["usage"]["completion_tokens"] < loose["usage"]["completion_tokens"]


NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
async def test_an_answer_with_a_format_beside_tools(served: Served, kind: str) -> None:
    """The model calls a tool, or its answer has the format; both behind thoughts, and nothing else."""
    form = {"type": kind} | ({"json_schema": {"name": "x", "schema": NUMBER}} if kind == "json_schema" else {})

    async def message(says: str, **more: Any) -> dict[str, Any]:
        [choice] = (await ask(served, says, response_format=form, max_tokens=200, **more))["choices"]
        assert choice["finish_reason"] == ("tool_calls" if "tool_calls" in choice["message"] else "stop")
        return choice["message"]

    assert call_of(await message(CALL)) == ("get_weather", {"city": "Köln"})
    assert [call["function"]["name"] for call in (await message(CALLS))["tool_calls"]] == ["get_weather", "get_time"]
    assert call_of(await message(CALLS, parallel_tool_calls=False)) == ("get_weather", {"city": "Köln"})
    found = await message('{"n": 7}')
    assert (found["content"], found.get("tool_calls")) == ('{"n": 7}', None)
    found = await message(THOUGHT + '{"n": 7}')
    assert (found["reasoning"], found["content"]) == ("hm", '{"n": 7}')
    assert call_of(await message(THOUGHT + CALL)) == ("get_weather", {"city": "Köln"})
    opened = await message("hm</think>" + CALL, chat_template_kwargs={"thinking": True})
    assert (opened["reasoning"], call_of(opened)[0]) == ("hm", "get_weather")
    # Its "r" is taken for a brace: text is neither a call nor of the format.
    answer = await ask(served, "rain", response_format=form, max_tokens=1)
    assert answer["choices"][0]["message"]["content"] != "r"


async def test_a_call_that_is_required_has_no_format(served: Served) -> None:
    calls = '[{"name": "get_weather", "parameters": {"city": "Köln"}}]'
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": NUMBER}}
    answer = await ask(served, calls, response_format=form, tool_choice="required")
    assert call_of(answer["choices"][0]["message"]) == ("get_weather", {"city": "Köln"})
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer = await ask(served, '{"city": "Köln"}', response_format=form, tool_choice=named)
    assert call_of(answer["choices"][0]["message"]) == ("get_weather", {"city": "Köln"})


async def test_where_strict_has_no_effect(served: Served, tool_model: Path) -> None:
    """Forced calls follow the schema anyway. The header names `strict` where the answer is not held to it: beside
    another constraint, and in formats without marks or without JSON."""

    async def ignored(server: Served, says: str, **more: Any) -> str | None:
        asked = body(says, **{"tools": [STRICT], "max_tokens": 5, **more})
        response = await server.client.post("/v1/chat/completions", json=asked)
        assert response.status_code == 200, response.text
        header: str | None = response.headers.get("x-quire-ignored")
        return header

    assert await ignored(served, "x") is None
    assert await ignored(served, "[]", tool_choice="required") is None
    assert await ignored(served, "{}", response_format={"type": "json_object"}) is None
    assert await ignored(served, "{}", structured_outputs={"json_object": True}) == "tools[].function.strict"
    async with serving(tool_model, ServerSettings(tool_call_parser="qwen3_coder")) as tags:
        assert await ignored(tags, "x") == "tools[].function.strict"
        flat = {"name": "f", "strict": True, "input_schema": {"type": "object"}}
        asked = {
            "model": str(tool_model),
            "messages": [{"role": "user", "content": "=x"}],
            "max_tokens": 5,
            "tools": [flat],
        }
        response = await tags.client.post("/v1/messages", json=asked)
        assert response.headers.get("x-quire-ignored") == "tools[].strict", response.text
    unusable = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"uniqueItems": True}}}
    response = await served.client.post("/v1/chat/completions", json=body("x", tools=[unusable]))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools"), response.text


def rename_tokens(path: Path, first: int, texts: list[str], *, are_special: bool = True) -> None:
    """Give the added tokens from number `first` on these texts."""
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    for token, text in zip(tokenizer["added_tokens"][first:], texts, strict=False):
        token["content"], token["special"] = text, are_special
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    file = path / "tokenizer_config.json"  # whose end-of-sequence token has the next id
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": tokenizer["added_tokens"][1]["content"]}))


async def test_calls_of_gpt_oss(tmp_path: Path) -> None:
    """Forced and strict calls stand in channels of their own, behind thoughts."""
    template = (
        "{# <|channel|> <|message|> <|start|> #}{% for message in messages %}{{ message.content }}<|return|>"
        "{% endfor %}<|start|>assistant"
    )
    path = write_model(tmp_path / "harmony", template, 512)
    rename_tokens(path, 1, ["<|return|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>"])
    head = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    right, wrong = head + call + '{"city": "Rom"}', head + call + '{"town": "Rom"}'
    answer = head + "<|channel|>final<|message|>It rains."
    named = {"type": "function", "function": {"name": "get_weather"}}
    async with serving(path) as served:
        for more in ({"tool_choice": "required"}, {"tool_choice": named}, {"tools": [STRICT]}):
            for says in (right, wrong):
                [choice] = (await ask(served, says, max_tokens=150, **more))["choices"]
                assert choice["message"]["reasoning"] == "hm"
                [function] = [each["function"] for each in choice["message"]["tool_calls"]]
                assert function["name"] == "get_weather"
                assert function["arguments"].startswith('{"city": ' if says is wrong else '{"city": "Rom"}')
                if says is right:
                    assert choice["finish_reason"] == ("stop" if more.get("tool_choice") == named else "tool_calls")
            message = (await ask(served, answer, max_tokens=150, **more))["choices"][0]["message"]
            assert (message["content"] == "It rains.") == ("tools" in more)
        assert call_of((await ask(served, wrong))["choices"][0]["message"]) == ("get_weather", {"town": "Rom"})
        number = {"type": "json_schema", "json_schema": {"name": "x", "schema": NUMBER}}
        for kind in ("", " <|constrain|>json"):  # the model writes either before an answer that is JSON
            says = f'{head}<|channel|>final{kind}<|message|>{{"n": 7}}'
            for tools in (None, [WEATHER]):
                message = (await ask(served, says, response_format=number, tools=tools))["choices"][0]["message"]
                assert (message["reasoning"], message["content"]) == ("hm", '{"n": 7}')
        message = (await ask(served, right, response_format=number))["choices"][0]["message"]
        assert call_of(message) == ("get_weather", {"city": "Rom"})
        message = (await ask(served, "no channel", response_format=number, tools=None))["choices"][0]["message"]
        assert "no channel" not in (message["content"] or "")


async def test_functions_instead_of_tools(served: Served) -> None:
    """OpenAI's former names, answered in their form, streamed as well; the model is shown tools."""
    functions = [WEATHER["function"], TIME["function"]]
    asked = {"tools": None, "functions": functions}
    answer = await ask(served, "Look.\n" + CALLS, **asked, return_token_ids=True)
    [choice] = answer["choices"]
    message = choice["message"]
    expected = {"name": "get_weather", "arguments": '{"city": "Köln"}'}
    assert (message["content"], message["function_call"]) == ("Look.\n", expected)
    assert "tool_calls" not in message
    assert choice["finish_reason"] == "function_call"
    prompt = served.context.tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)
    assert prompt.startswith("get_weather get_time <|start|>user")
    response = await served.client.post("/v1/chat/completions", json=body(CALL, stream=True, **asked))
    deltas = [each["delta"] for chunk in chunks(response.text) for each in chunk["choices"]]
    pieces = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert pieces[0]["name"] == "get_weather"
    assert "".join(piece.get("arguments") or "" for piece in pieces) == '{"city": "Köln"}'
    assert not any("tool_calls" in delta for delta in deltas)
    for choice in ({"name": "get_weather"}, "none"):
        [found] = (await ask(served, '{"city": "Rom"}', **asked, function_call=choice))["choices"]
        call = None if choice == "none" else {"name": "get_weather", "arguments": '{"city": "Rom"}'}
        assert (found["message"]["function_call"], found["finish_reason"]) == (call, "stop")
    wrong = [{"name": "f", "parameters": {"type": "nonsense"}}]
    for more, param in (({"function_call": {"name": "f"}}, "functions"), ({}, None)):
        asked = body("x", tools=None, functions=wrong, **more)
        response = await served.client.post("/v1/chat/completions", json=asked)
        assert response.status_code == (400 if param else 200)
        assert param is None or response.json()["error"]["param"] == param


async def test_a_conversation_with_functions(tool_model: Path, tmp_path: Path) -> None:
    """The template sees tool calls and messages of tools."""
    template = (
        "{# <tool_call> #}{% for message in messages %}{{ message.role }} {{ message.tool_call_id }}"
        "{% for call in message.tool_calls %}{{ call.id }}{{ call.function.arguments.city }}{% endfor %};{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"city": "Rom"}'}},
        {"role": "function", "name": "f", "content": "sunny"},
    ]
    async with serving(write_model(tmp_path / "functions", template, 512)) as served:
        asked = body("", messages=messages, tools=None, functions=[{"name": "f"}], max_tokens=1, return_token_ids=True)
        answer = (await served.client.post("/v1/chat/completions", json=asked)).json()
        prompt = served.context.tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)
        assert prompt == "user ;assistant call00001Rom;tool call00001;"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": "maybe"}, "tool_choice must be one of none, auto, required"),
        ({"tool_choice": "required", "tools": None}, "when using tool_choice, tools must be set"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "nope"}}},
            "does not match any of the specified tools",
        ),
        ({"tool_choice": "auto", "tools": None}, "when using tool_choice, tools must be set"),
        ({"tools": []}, "tools must not be an empty list"),
        ({"tool_choice": {"type": "function"}}, "needs function"),
        ({"tools": [{"type": "browser", "function": {"name": "f"}}]}, "only 'function' is"),
        ({"tools": [{"type": "function"}]}, "tools[0].function is required"),
        ({"tools": [{"function": {"name": "f" * 300}}]}, "tools[0].function.name"),
        ({"functions": [{"name": "f"}]}, "functions and function_call go without tools and tool_choice"),
        (
            {"tools": None, "functions": [{"name": "f"}], "function_call": "required"},
            "must be none, auto or a function",
        ),
        ({"tools": None, "functions": [{"name": "f"}], "function_call": {"name": "g"}}, "which is not in functions"),
        ({"tools": None, "function_call": {"name": "g"}}, "which is not in functions"),
        ({"tool_choice": "required", "structured_outputs": {"json_object": True}}, "exclude one another"),
    ],
)
async def test_what_is_refused(served: Served, fields: dict[str, Any], message: str) -> None:
    assert message in await error(served, **fields)


async def test_a_model_without_tools(model_path: Path) -> None:
    """Its template shows no format: automatic choice is refused, forced calls work, and the server can be told."""
    async with serving(model_path) as served:
        assert '"auto" tool choice requires --enable-auto-tool-choice' in await error(served)
        assert "needs a model whose chat template shows" in await error(served, tools=None, thinking_token_budget=3)
        [choice] = (await ask(served, '{"city": ""}', tool_choice={"function": {"name": "get_weather"}}))["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": ""}'
    async with serving(model_path, ServerSettings(tool_call_parser="pythonic", enable_auto_tool_choice=True)) as served:
        [choice] = (await ask(served, '[get_weather(city="Rom")]'))["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rom"}'
    with pytest.raises(ConfigError, match="enable_auto_tool_choice needs a tool_call_parser"):
        async with serving(model_path, ServerSettings(enable_auto_tool_choice=True)):
            pass
    with pytest.raises(ConfigError, match="unknown parser 'hermess'; did you mean 'hermes'"):
        async with serving(model_path, ServerSettings(tool_call_parser="hermess")):
            pass


@pytest.mark.parametrize("reasoning", [None, "none"])
async def test_thoughts_stay_in_the_content_without_a_reasoning_parser(tool_model: Path, reasoning: str | None) -> None:
    """As in vLLM, whatever the chat template shows; calls behind them are found all the same."""
    async with serving(tool_model, ServerSettings(reasoning_parser=reasoning)) as served:
        answer = await ask(served, "<think>a</think>b", tools=None)
        message = answer["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == ("<think>a</think>b", None)
        assert "completion_tokens_details" not in answer["usage"]
        _, messages = await streamed(served, THOUGHT + CALL)
        assert (messages[0]["content"], messages[0]["calls"]) == (THOUGHT, [["get_weather", '{"city": "Köln"}']])


async def test_the_tool_parser_can_be_switched_off(tool_model: Path) -> None:
    async with serving(tool_model, ServerSettings(tool_call_parser="none")) as served:
        assert '"auto" tool choice requires' in await error(served)


async def test_marks_that_are_special_tokens(tmp_path: Path) -> None:
    """They are left out of texts otherwise; the parser sees them, and clients do not."""
    template = TEMPLATE.replace("<think>", "[THINK]").replace("<tool_call>", "[TOOL_CALLS]")
    path = write_model(tmp_path / "mistral", template, 512)
    rename_tokens(path, 2, ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"])
    async with serving(path, ServerSettings(reasoning_parser="mistral")) as served:
        answer = await ask(served, '[THINK]hm[/THINK][TOOL_CALLS]get_weather[ARGS]{"city": "Rom"}')
        message = answer["choices"][0]["message"]
        assert message["reasoning"] == "hm"
        assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Rom"}'}
        assert re.fullmatch("[A-Za-z0-9]{9}", message["tool_calls"][0]["id"])
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


async def test_the_official_client(tool_model: Path) -> None:
    """The stream helper of openai-python accumulates deltas by its own rules; a second turn brings the calls back."""
    async with (
        serving(tool_model, live=True) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        asked: dict[str, Any] = {"model": "tiny", "tools": [WEATHER, TIME]}
        messages: list[Any] = [{"role": "user", "content": "=" + CALLS}]
        whole = await client.chat.completions.create(messages=messages, **asked)
        async with client.chat.completions.stream(messages=messages, **asked) as stream:
            final = await stream.get_final_completion()
        for answer in (whole, final):
            calls = answer.choices[0].message.tool_calls
            assert calls is not None
            found = [(call.function.name, call.function.arguments) for call in calls]
            assert found == [("get_weather", '{"city": "Köln"}'), ("get_time", "{}")]
            assert answer.choices[0].finish_reason == "tool_calls"
        messages.append(whole.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": calls[0].id, "content": "sunny"})
        again = await client.chat.completions.create(messages=messages, **asked, max_tokens=5)
        assert again.usage is not None
        assert again.usage.completion_tokens == 5
