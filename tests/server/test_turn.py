"""What the other APIs make of thoughts, text and calls that the chat endpoint streams, with the official clients."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import openai
import pytest

from quire.outputs import RequestOutput
from quire.parsers.output import CallPiece, OutputDelta
from quire.sampling_params import SamplingParams
from quire.server import turn
from quire.server.chat import Begin, Piece
from quire.server.errors import ApiError
from quire.server.protocol.chat import ChatLogprob, ChatLogprobs
from quire.server.protocol.common import CompletionTokensDetails, PromptTokensDetails, Usage
from quire.server.settings import ServerSettings
from quire.server.turn import Kind, Turn
from tests.parsers.driver import make_parser
from tests.server.conftest import Served, serving
from tests.server.model_directory import write_model
from tests.server.test_tools import CALLS, TEMPLATE, THOUGHT, TIME, WEATHER


def call(index: int, name: str | None, arguments: str, call_id: str | None = None) -> OutputDelta:
    return OutputDelta(tool_calls=[CallPiece(index, call_id, name, arguments)])


DELTAS: list[OutputDelta] = [
    OutputDelta(reasoning="let "),
    OutputDelta(reasoning="me"),
    OutputDelta(content="I "),
    OutputDelta(content="call"),
    call(0, "weather", "", "call_a"),
    call(0, None, '{"city":'),
    call(0, None, '"Rome"}'),
    call(1, "weather", '{"city":"Oslo"}', "call_b"),
]


class ScriptedAnswer:
    """In place of ChatAnswer."""

    finish: ClassVar[str] = "tool_calls"
    deltas: ClassVar[list[OutputDelta]] = DELTAS
    bodies: ClassVar[list[Any]] = []
    ineffective_fields: ClassVar[list[str]] = []
    engine_id = "chatcmpl-1"
    params = SamplingParams(temperature=0.5, top_p=0.9)
    usage = Usage(9, 7, 16, PromptTokensDetails(4), CompletionTokensDetails(2))

    def __init__(self, context: object = None, body: object = None, header_id: str | None = None, **_: object) -> None:
        self.bodies.append(body)

    async def events(self) -> AsyncGenerator[Begin | Piece, None]:
        yield Begin(0, RequestOutput("1", None, [1, 2], [], False), is_first=True)
        for piece in self.pieces():
            yield piece
        yield Piece(0, OutputDelta(), finish_reason=self.finish)

    def pieces(self) -> list[Piece]:
        return [Piece(0, delta) for delta in self.deltas]


def messages_given() -> list[dict[str, Any]]:
    """The messages of the only request that was made: role, text and the other fields."""
    [body] = ScriptedAnswer.bodies
    found = msgspec.msgpack.decode(body.messages.found.encoded)
    return [
        {"role": each["role"], "content": "".join(part["text"] for part in each["content"] or ()), **each["fields"]}
        for each in found
    ]


@pytest.fixture
async def scripted(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setattr(turn, "ChatAnswer", ScriptedAnswer)
    async with serving(model_path, ServerSettings(port=0, served_model_name=["tiny"]), live=True) as served:
        yield served


async def test_responses(scripted: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="k", max_retries=0) as client:
        whole = await client.responses.create(model="tiny", input="a")
        async with client.responses.stream(model="tiny", input="a") as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        kinds = [item.type for item in whole.output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        assert whole.output[0].content[0].text == "let me"
        assert whole.output_text == "I call"
        calls = [(item.call_id, item.name, item.arguments) for item in whole.output[2:]]
        assert calls == [("call_a", "weather", '{"city":"Rome"}'), ("call_b", "weather", '{"city":"Oslo"}')]
        assert whole.usage.output_tokens_details.reasoning_tokens == 2
        assert whole.usage.input_tokens_details.cached_tokens == 4
        for one, other in zip(whole.output, final.output, strict=True):
            assert one.to_dict()["type"] == other.to_dict()["type"]
            assert getattr(one, "arguments", None) == getattr(other, "arguments", None)
        kinds = [event.type for event in events]
        assert kinds.count("response.output_item.done") == 4
        assert kinds.count("response.function_call_arguments.done") == 2
        assert "response.reasoning_text.done" in kinds
        assert (whole.output[0].summary, [kind for kind in kinds if "summary" in kind]) == ([], [])
        # The stored turn is what comes before the next one.
        ScriptedAnswer.bodies.clear()
        await client.responses.create(model="tiny", input="b", previous_response_id=whole.id)
        [assistant] = [message for message in messages_given() if message["role"] == "assistant"]
        assert (assistant["content"], assistant["reasoning"]) == ("I call", "let me")
        assert [each["id"] for each in assistant["tool_calls"]] == ["call_a", "call_b"]


async def test_a_name_that_no_request_may_have(scripted: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model may call what requests may not name: the response is told, and goes no further."""
    monkeypatch.setattr(ScriptedAnswer, "deltas", [call(0, "n" * 1100, "{}", "call_a")])
    async with openai.AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="k", max_retries=0) as client:
        whole = await client.responses.create(model="tiny", input="a")
        assert whole.output[0].name == "n" * 1100
        begun = await client.responses.create(model="tiny", input="a", background=True)
        while begun.status in ("queued", "in_progress"):
            begun = await client.responses.retrieve(begun.id)
        assert (begun.status, begun.output[0].name) == ("completed", "n" * 1100)
        with pytest.raises(openai.BadRequestError, match="cannot be continued"):
            await client.responses.create(model="tiny", input="b", previous_response_id=whole.id)


async def test_a_call_that_was_cut_is_continued(scripted: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedAnswer, "deltas", [call(0, "weather", '{"city":"Ro', "call_a")])
    async with openai.AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="k", max_retries=0) as client:
        cut = await client.responses.create(model="tiny", input="a")
        ScriptedAnswer.bodies.clear()
        await client.responses.create(model="tiny", input="b", previous_response_id=cut.id)
        [assistant] = [message for message in messages_given() if message["role"] == "assistant"]
        assert [each["function"]["arguments"] for each in assistant["tool_calls"]] == [{}]
        given = [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]
        with pytest.raises(openai.BadRequestError, match="not valid JSON"):
            await client.responses.create(model="tiny", input=given)  # type: ignore[arg-type]


def logprobs(*tokens: str) -> ChatLogprobs:
    return ChatLogprobs([ChatLogprob(token, -1.0, list(token.encode()), []) for token in tokens])


@pytest.mark.parametrize(
    "chunks",
    [
        [({"reasoning": "hm"}, "<think>hm"), ({}, "</think>"), ({"content": "Yé"}, "Yé"), ({"content": "s"}, "s.")],
        [({"reasoning": "hm", "content": "Yé"}, "<think> hm </think> Y é"), ({"content": "s"}, "s </s>")],
        [({"reasoning": "h"}, "h"), ({"reasoning": "m", "content": "Yés"}, "m </think> Y és </s>")],
        [({"reasoning": "hm"}, "hm </think>"), ({}, "Y"), ({"content": "Yés"}, "és")],
        [({"content": "Yés"}, "Yés")],
    ],
)
async def test_log_probabilities_behind_thoughts(chunks: list[tuple[dict[str, Any], str]]) -> None:
    """The text's are those of its tokens, also where thoughts and text come in one chunk; neither thoughts nor their
    marks have any."""

    class Told(ScriptedAnswer):
        def pieces(self) -> list[Piece]:
            return [Piece(0, OutputDelta(**delta), logprobs(*tokens.split())) for delta, tokens in chunks]

    events = [event async for event in Turn(Told(), {}).events()]  # type: ignore[arg-type]
    written = [event for event in events if event.piece and event.segment and event.segment.kind is Kind.TEXT]
    told = [entry.token for event in written for entry in event.logprobs]
    assert "".join(told).removesuffix("</s>").rstrip(".") == "Yés"
    assert written[0].logprobs
    assert written[0].segment is not None
    assert [entry.token for entry in written[0].segment.logprobs] == told


async def test_calls_of_functions_in_a_namespace(scripted: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedAnswer, "deltas", [call(0, "maps__weather", "{}", "call_a")])
    member = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    asked: Any = {
        "model": "tiny",
        "tools": [{"type": "namespace", "name": "maps", "description": "d", "tools": [member]}],
    }
    async with openai.AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="k", max_retries=0) as client:
        whole = await client.responses.create(input="a", **asked)
        events = [event async for event in await client.responses.create(input="a", stream=True, **asked)]
        told = [event.item for event in events if event.type.startswith("response.output_item.")]
        assert [(item.namespace, item.name) for item in (*whole.output, *told)] == [("maps", "weather")] * 3
        [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert done.name == "weather"
        ScriptedAnswer.bodies.clear()
        await client.responses.create(input="b", previous_response_id=whole.id, **asked)
        [assistant] = [message for message in messages_given() if message["role"] == "assistant"]
        assert assistant["tool_calls"][0]["function"]["name"] == "maps__weather"
        items = (await client.responses.input_items.list(whole.id, order="asc")).data
        assert [(item.namespace, item.name) for item in items if item.type == "function_call"] == [("maps", "weather")]


async def test_thoughts_are_their_summary_where_one_is_asked_for(scripted: Served) -> None:
    asked: Any = {"model": "tiny", "reasoning": {"summary": "auto"}}
    async with openai.AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="k", max_retries=0) as client:
        whole = await client.responses.create(input="a", **asked)
        async with client.responses.stream(input="a", **asked) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        for item in (whole.output[0], final.output[0]):
            assert ([part.text for part in item.summary], item.content[0].text) == (["let me"], "let me")
        told = [event for event in events if event.type.startswith("response.reasoning_summary_")]
        kinds = [event.type.removeprefix("response.reasoning_summary_") for event in told]
        assert kinds == ["part.added", "text.delta", "text.delta", "text.done", "part.done"]
        assert {(event.item_id, event.output_index, event.summary_index) for event in told} == {
            (final.output[0].id, 0, 0)
        }
        assert "".join(event.delta for event in told[1:3]) == told[3].text == told[4].part.text == "let me"
        ScriptedAnswer.bodies.clear()
        await client.responses.create(model="tiny", input="b", previous_response_id=whole.id)
        assert [message.get("reasoning") for message in messages_given()][1] == "let me"
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model="tiny", input="b", reasoning={"summary": "short"})


async def test_messages(scripted: Served) -> None:
    import anthropic

    async with anthropic.AsyncAnthropic(base_url=scripted.url, api_key="k", max_retries=0) as client:
        whole = await client.messages.create(model="tiny", max_tokens=9, messages=[{"role": "user", "content": "a"}])
        async with client.messages.stream(
            model="tiny", max_tokens=9, messages=[{"role": "user", "content": "a"}]
        ) as stream:
            final = await stream.get_final_message()
    for message in (whole, final):
        assert message.stop_reason == "tool_use"
        thinking, text, *calls = message.content
        assert (thinking.type, thinking.thinking) == ("thinking", "let me")
        assert (text.type, text.text) == ("text", "I call")
        assert [(each.id, each.name, each.input) for each in calls] == [
            ("call_a", "weather", {"city": "Rome"}),
            ("call_b", "weather", {"city": "Oslo"}),
        ]
        usage = message.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (5, 4, 7)


@pytest.mark.parametrize("reason", ["abort", "timeout", "error"])
async def test_a_turn_that_the_server_ends_is_an_error(reason: str) -> None:
    class Ended(ScriptedAnswer):
        finish = reason

    with pytest.raises(ApiError, match="before its end") as caught:
        await Turn(Ended(), {}).run()  # type: ignore[arg-type]
    assert caught.value.status == 503


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
async def test_parts_have_the_order_of_the_text_however_it_is_cut(size: int) -> None:
    calls = [f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in "fg"]
    text = f"<think>abc</think>Hello {calls[0]}Bye{calls[1]}"
    parser = make_parser("hermes", "qwen3")

    class Scripted(ScriptedAnswer):
        def pieces(self) -> list[Piece]:
            chunks = [text[start : start + size] for start in range(0, len(text), size)]
            found = [Piece(0, parser.feed(each), logprobs(*each)) for each in chunks]
            return [*found, Piece(0, parser.finish())]

    segments = (await Turn(Scripted(), {}).run()).segments  # type: ignore[arg-type]
    assert [(each.kind, each.name or each.text) for each in segments] == [
        (Kind.REASONING, "abc"),
        (Kind.TEXT, "Hello "),
        (Kind.CALL, "f"),
        (Kind.TEXT, "Bye"),
        (Kind.CALL, "g"),
    ]
    for each in segments:
        told = "".join(entry.token for entry in each.logprobs)
        assert told == ("" if each.kind is Kind.CALL else each.text)


async def test_logprobs_come_with_the_text_that_they_are_of() -> None:
    class Scripted(ScriptedAnswer):
        def pieces(self) -> list[Piece]:
            return [
                Piece(0, OutputDelta(content=text), logprobs(token))
                for token, text in zip("abc", ("", "ab", "c"), strict=True)
            ]

    [segment] = (await Turn(Scripted(), {}).run()).segments  # type: ignore[arg-type]
    assert (segment.kind, segment.text, segment.logprobs) == (Kind.TEXT, "abc", logprobs(*"abc").content)


@pytest.fixture
async def with_tools(tmp_path: Path) -> AsyncIterator[Served]:
    """A model whose template takes tools, and which says what stands behind "=" in the prompt."""
    path = write_model(tmp_path / "tools", TEMPLATE, 512)
    settings = ServerSettings(port=0, served_model_name=["tiny"], reasoning_parser="auto")
    async with serving(path, settings, live=True) as served:
        yield served


async def test_a_response_that_calls_tools(with_tools: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{with_tools.url}/v1", api_key="k", max_retries=0) as client:
        fields: dict[str, Any] = {
            "model": "tiny",
            "input": f"={THOUGHT}Look.{CALLS}",
            "tools": [{"type": "function", **tool["function"]} for tool in (WEATHER, TIME)],
        }
        whole = await client.responses.create(**fields)
        async with client.responses.stream(**fields) as stream:
            deltas = [event async for event in stream if event.type == "response.function_call_arguments.delta"]
            final = await stream.get_final_response()
        for answer in (whole, final):
            reasoning, message, *calls = answer.output
            assert (reasoning.type, reasoning.content[0].text, message.content[0].text) == ("reasoning", "hm", "Look.")
            found = [(each.name, json.loads(each.arguments)) for each in calls]
            assert found == [("get_weather", {"city": "Köln"}), ("get_time", {})]
            assert answer.usage.output_tokens_details.reasoning_tokens > 0
        for index, call in enumerate(final.output[2:], 2):
            assert "".join(each.delta for each in deltas if each.output_index == index) == call.arguments
        assert whole.tools[0].name == "get_weather"
        results = [
            {"type": "function_call_output", "call_id": each.call_id, "output": "=sunny"} for each in whole.output[2:]
        ]
        after = await client.responses.create(
            model="tiny", input=results, previous_response_id=whole.id, tools=fields["tools"], max_output_tokens=3
        )
        assert after.usage.input_tokens > whole.usage.input_tokens
        refused = fields | {"tool_choice": {"type": "function", "name": "missing"}}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**refused)
        assert caught.value.param.startswith("tool_choice")


async def test_a_message_that_calls_tools(with_tools: Served) -> None:
    import anthropic

    tools: Any = [
        {"name": tool["function"]["name"], "input_schema": tool["function"].get("parameters", {"type": "object"})}
        for tool in (WEATHER, TIME)
    ]
    fields: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"={THOUGHT}Look.{CALLS}"}],
        "tools": tools,
    }
    async with anthropic.AsyncAnthropic(base_url=with_tools.url, api_key="k", max_retries=0) as client:
        whole = await client.messages.create(**fields, max_tokens=250)
        async with client.messages.stream(**fields, max_tokens=250) as stream:
            final = await stream.get_final_message()
        for message in (whole, final):
            thinking, text, *calls = message.content
            assert (thinking.thinking, text.text) == ("hm", "Look.")
            assert [(each.name, each.input) for each in calls] == [("get_weather", {"city": "Köln"}), ("get_time", {})]
            assert message.stop_reason == "tool_use"
        count = await client.messages.count_tokens(**fields)
        assert count.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
        result = {"type": "tool_result", "tool_use_id": whole.content[2].id, "content": "=sunny"}
        history = [*fields["messages"], {"role": "assistant", "content": whole.content}]
        after = await client.messages.create(
            model="tiny", messages=[*history, {"role": "user", "content": [result]}], tools=tools, max_tokens=3
        )
        assert after.usage.output_tokens == 3
