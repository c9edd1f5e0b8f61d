"""/v1/messages with the official client, synchronous, asynchronous and streaming, and what it means as a chat."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from quire.server.protocol.anthropic import MessagesRequest
from quire.server.settings import ServerSettings
from tests.server.conftest import Served, serving

if TYPE_CHECKING:
    import anthropic  # takes a second: each process of the tests reads every module, and one runs these


@pytest.fixture
async def fast(model_path: Path) -> AsyncIterator[Served]:
    settings = ServerSettings(port=0, api_key=["key"], served_model_name=["tiny"])
    async with serving(model_path, settings, live=True) as served:
        yield served


@pytest.fixture
async def client(fast: Served) -> AsyncIterator[anthropic.AsyncAnthropic]:
    import anthropic

    async with anthropic.AsyncAnthropic(base_url=fast.url, api_key="key", max_retries=0) as client:
        yield client


def says(text: str) -> list[Any]:
    return [{"role": "user", "content": f"={text}"}]


async def test_a_message(client: anthropic.AsyncAnthropic, fast: Served) -> None:
    answer = await client.messages.create(
        model="tiny",
        max_tokens=50,
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        messages=says("hello"),
        extra_body={"temperature": 0.5, "top_k": 5, "top_p": 0.9},
        metadata={"user_id": "Ann"},
    )
    [block] = answer.content
    assert (block.type, block.text) == ("text", "hello")
    assert (answer.role, answer.model, answer.stop_reason, answer.stop_sequence) == (
        "assistant", "tiny", "end_turn", None,
    )  # fmt: skip
    assert answer.id.startswith("msg_")
    assert answer.usage.output_tokens == 6
    again = await client.messages.create(model="tiny", max_tokens=50, system="be brief", messages=says("hello"))
    assert again.usage.cache_read_input_tokens + again.usage.input_tokens == answer.usage.input_tokens
    assert again.usage.cache_read_input_tokens > 0
    await fast.until_idle()


async def test_reasons_to_stop(client: anthropic.AsyncAnthropic) -> None:
    cut = await client.messages.create(model="tiny", max_tokens=3, messages=says("abcdef"))
    assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "abc")
    found = await client.messages.create(model="tiny", max_tokens=9, messages=says("abcdef"), stop_sequences=["x", "d"])
    assert (found.stop_reason, found.stop_sequence, found.content[0].text) == ("stop_sequence", "d", "abc")


async def test_more_tokens_than_fit_are_no_error(client: anthropic.AsyncAnthropic) -> None:
    """Clients ask for as much as the models that they know can give; the stop reason says what ended the answer."""
    import anthropic

    short = await client.messages.create(model="tiny", max_tokens=16384, messages=says("abc"))
    assert (short.stop_reason, short.content[0].text) == ("end_turn", "abc")
    endless: list[Any] = [{"role": "user", "content": "no copy"}]
    cut = await client.messages.create(model="tiny", max_tokens=16384, messages=endless)
    assert cut.stop_reason == "model_context_window_exceeded"
    assert cut.usage.input_tokens + cut.usage.cache_read_input_tokens + cut.usage.output_tokens == 256
    async with client.messages.stream(model="tiny", max_tokens=16384, messages=endless) as stream:
        assert (await stream.get_final_message()).stop_reason == "model_context_window_exceeded"
    with pytest.raises(anthropic.BadRequestError, match="256"):
        await client.messages.create(model="tiny", max_tokens=1, messages=says("a" * 300))


async def test_a_stream(client: anthropic.AsyncAnthropic) -> None:
    stream = await client.messages.create(model="tiny", max_tokens=9, messages=says("stream"), stream=True)
    events = [event async for event in stream]
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert "".join(event.delta.text for event in events[2:-3]) == "stream"
    assert events[0].message.usage.input_tokens > 0
    assert events[0].message.usage.output_tokens <= 1
    assert (events[-2].delta.stop_reason, events[-2].usage.output_tokens) == ("end_turn", 7)


async def test_the_stream_helper(client: anthropic.AsyncAnthropic) -> None:
    async with client.messages.stream(model="tiny", max_tokens=9, messages=says("helped")) as stream:
        text = [piece async for piece in stream.text_stream]
        final = await stream.get_final_message()
    assert "".join(text) == final.content[0].text == "helped"
    assert final.usage.output_tokens == 7


async def test_the_wire(fast: Served) -> None:
    body = {"model": "tiny", "max_tokens": 2, "messages": says("ab"), "stream": True}
    headers = {"x-api-key": "key", "anthropic-version": "2023-06-01", "anthropic-beta": "some"}
    response = await fast.client.post("/v1/messages?beta=true", json=body, headers=headers)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["request-id"]
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    for line in lines:
        name, data = line.split("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
    assert [line.split("\n")[0] for line in lines][1] == "event: ping"


async def test_the_beginning_of_the_answer(client: anthropic.AsyncAnthropic) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "=xyz"}]}]
    answer = await client.messages.create(model="tiny", max_tokens=20, messages=messages)
    assert answer.content[0].text == "xyz"


async def test_counting(client: anthropic.AsyncAnthropic) -> None:
    count = await client.messages.count_tokens(model="tiny", messages=says("hello"), system="be brief")
    answer = await client.messages.create(model="tiny", max_tokens=1, messages=says("hello"), system="be brief")
    usage = answer.usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


async def test_errors(client: anthropic.AsyncAnthropic, fast: Served) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(model="other", max_tokens=1, messages=says("a"))
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as bad:
        await client.messages.create(model="tiny", max_tokens=1, messages=says("a"), extra_body={"temperature": -1})
    assert bad.value.body["type"] == "error"
    assert "temperature" in bad.value.body["error"]["message"]
    with pytest.raises(anthropic.AuthenticationError) as key:
        await client.with_options(api_key="wrong").messages.create(model="tiny", max_tokens=1, messages=says("a"))
    assert key.value.body["error"]["type"] == "authentication_error"
    image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    with pytest.raises(anthropic.BadRequestError, match="images are not supported: prompts are text"):
        await client.messages.create(model="tiny", max_tokens=1, messages=[{"role": "user", "content": [image]}])
    tool: Any = {"type": "web_search_20250305", "name": "web_search"}
    with pytest.raises(anthropic.BadRequestError, match="'web_search_20250305' are not supported"):
        await client.messages.create(model="tiny", max_tokens=1, messages=says("a"), tools=[tool])
    headers = {"x-api-key": "key"}
    for path, content in (("/v1/messages", b"{"), ("/v1/messages/count_tokens", b"{}"), ("/v1/messages", b"[]")):
        answer = await fast.client.post(path, content=content, headers={**headers, "Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    answer = await fast.client.post("/v1/messages", content=b"a=b", headers={**headers, "Content-Type": "text/plain"})
    assert (answer.status_code, answer.json()["type"]) == (415, "error")


async def test_a_conversation_that_the_server_should_hold_is_refused(fast: Served) -> None:
    """By the details of the error the client's runner of tools knows that it has to send the whole conversation."""
    body = {"model": "tiny", "max_tokens": 2, "messages": says("a"), "thread": {"type": "create"}}
    answer = await fast.client.post("/v1/messages", json=body, headers={"x-api-key": "key"})
    error = answer.json()["error"]
    assert (answer.status_code, error["details"]) == (400, {"error_code": "thread_unsupported_request"})
    assert "thread is not supported" in error["message"]
    body["thread"] = None
    assert (await fast.client.post("/v1/messages", json=body, headers={"x-api-key": "key"})).status_code == 200


async def test_an_error_in_the_middle_of_a_stream(model_path: Path) -> None:
    import anthropic

    settings = ServerSettings(port=0, served_model_name=["tiny"])
    async with (
        serving(model_path, settings, executor="failing", live=True) as served,
        anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as client,
    ):
        stream = await client.messages.create(model="tiny", max_tokens=99, messages=says("a" * 90), stream=True)
        with pytest.raises(anthropic.APIStatusError, match="the engine core failed"):
            async for _ in stream:
                pass


async def test_leaving_frees_the_blocks(live: Served) -> None:
    import anthropic

    name = live.context.model_names[0]
    async with anthropic.AsyncAnthropic(base_url=live.url, api_key="none") as client:
        stream = await client.messages.create(model=name, max_tokens=100, messages=says("a" * 99), stream=True)
        async for event in stream:
            if event.type == "content_block_delta":
                break
        await stream.close()
        await live.until_idle()
        whole = asyncio.ensure_future(client.messages.create(model=name, max_tokens=100, messages=says("b" * 99)))
        await live.until_running(1)
        whole.cancel()
        await live.until_idle()


async def test_the_synchronous_client(fast: Served) -> None:
    import anthropic

    def talk() -> tuple[str, str]:
        with anthropic.Anthropic(base_url=fast.url, api_key="key") as client:
            answer = client.messages.create(model="tiny", max_tokens=9, messages=says("sync"))
            with client.messages.stream(model="tiny", max_tokens=9, messages=says("flow")) as stream:
                return answer.content[0].text, "".join(stream.text_stream)

    assert await asyncio.to_thread(talk) == ("sync", "flow")


def to_chat(**fields: Any) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], **fields}
    request = msgspec.convert(body, MessagesRequest)
    return {**request.to_chat(), "messages": request.chat_messages}


def test_a_conversation_with_tools_as_a_chat() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    chat = to_chat(
        system=[{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
        messages=[
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "let me see"},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sun"}]},
                    {"type": "text", "text": "and now?"},
                ],
            },
        ],
        tools=[{"name": "weather", "description": "d", "input_schema": schema}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "disabled"},
        temperature=0,
        stop_sequences=["x"],
    )
    assert chat["messages"] == [
        {"role": "system", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "let me see",
            "reasoning": "hm",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": [{"type": "text", "text": "sun"}]},
        {"role": "user", "content": [{"type": "text", "text": "and now?"}]},
    ]
    assert chat["tools"] == [
        {"type": "function", "function": {"name": "weather", "description": "d", "parameters": schema}}
    ]
    assert (chat["tool_choice"], chat["parallel_tool_calls"], chat["temperature"], chat["stop"]) == (
        "required", False, 0, ["x"],
    )  # fmt: skip
    assert chat["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}


def test_a_budget_of_thoughts_has_an_effect_where_it_is_known_how_the_model_reasons() -> None:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    request = msgspec.convert({**body, "thinking": {"type": "enabled", "budget_tokens": 7}}, MessagesRequest)
    assert request.to_chat(reasons=True)["thinking_token_budget"] == 7
    assert request.ignored(reasons=True) == []
    assert "thinking_token_budget" not in request.to_chat()
    assert request.ignored(reasons=False) == ["thinking.budget_tokens"]


async def test_a_budget_that_has_no_effect_is_reported(fast: Served) -> None:
    thinking = {"type": "enabled", "budget_tokens": 7}
    body = {"model": "tiny", "max_tokens": 2, "messages": says("a"), "thinking": thinking}
    answer = await fast.client.post("/v1/messages", json=body, headers={"x-api-key": "key"})
    assert (answer.status_code, answer.headers["x-quire-ignored"]) == (200, "thinking.budget_tokens")


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_choices_of_tools(choice: dict[str, Any], expected: object) -> None:
    assert to_chat(tools=[{"name": "f", "input_schema": {}}], tool_choice=choice)["tool_choice"] == expected


def test_a_form_of_the_answer() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": form, "effort": "low"}}, {"output_format": form}):
        chat = to_chat(**fields)
        assert chat["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert to_chat(output_config={"effort": "low"})["reasoning_effort"] == "low"
