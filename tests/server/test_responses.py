"""/v1/responses with the official client: whole, streamed, gone on from, and what a request means as a chat."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from quire.errors import UserError
from quire.server.protocol.response_items import Listing, StoredItems, chat_messages_of, items_of
from quire.server.protocol.responses import ResponsesRequest
from quire.server.response_store import ResponseRejection, ResponseStore, StoredResponse
from quire.server.settings import ServerSettings
from tests.server.conftest import Served, serving


@pytest.fixture
async def fast(model_path: Path) -> AsyncIterator[Served]:
    settings = ServerSettings(port=0, api_key=["key", "other"], served_model_name=["tiny"])
    async with serving(model_path, settings, live=True) as served:
        yield served


@pytest.fixture
async def client(fast: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{fast.url}/v1", api_key="key", max_retries=0) as client:
        yield client


async def test_a_response(client: openai.AsyncOpenAI, fast: Served) -> None:
    answer = await client.responses.create(
        model="tiny",
        input="=hello",
        instructions="be brief",
        max_output_tokens=50,
        temperature=0.5,
        top_p=0.9,
        metadata={"a": "b"},
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=2,
        text={"format": {"type": "text"}},
        truncation="disabled",
        service_tier="auto",
        user="Ann",
    )
    assert answer.output_text == "hello"
    [item] = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert [entry.token for entry in item.content[0].logprobs][:2] == ["h", "e"]
    assert len(item.content[0].logprobs[0].top_logprobs) == 2
    assert (answer.status, answer.object, answer.model, answer.error) == ("completed", "response", "tiny", None)
    assert (answer.metadata, answer.temperature, answer.instructions) == ({"a": "b"}, 0.5, "be brief")
    usage = answer.usage
    assert usage.output_tokens == 6
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (await client.responses.retrieve(answer.id)).output_text == "hello"
    await fast.until_idle()


async def test_a_cut_response(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="tiny", input="=hello", max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason, answer.output_text) == (
        "incomplete", "max_output_tokens", "hel",
    )  # fmt: skip
    assert answer.output[0].status == "incomplete"


async def test_a_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.responses.create(model="tiny", input="=abc", stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == events[-4].text == "abc"
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])
    assert events[2].item.content == []
    assert events[-2].item == events[-1].response.output[0]
    assert events[-1].response.usage.output_tokens == 4


async def test_the_stream_helper(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(model="tiny", input=[{"role": "user", "content": "=helped"}]) as stream:
        text = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(text) == final.output_text == "helped"


async def test_going_on(client: openai.AsyncOpenAI, fast: Served) -> None:
    first = await client.responses.create(model="tiny", input="=one", instructions="not carried over")
    second = await client.responses.create(
        model="tiny", input="two", previous_response_id=first.id, max_output_tokens=20
    )
    history: Any = [
        {"role": "user", "content": "=one"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "one", "annotations": []}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "two"}]},
    ]
    whole = await client.responses.create(model="tiny", input=history, max_output_tokens=20, store=False)
    assert second.previous_response_id == first.id
    assert second.output_text == whole.output_text
    assert second.usage.input_tokens == whole.usage.input_tokens
    stream = await client.responses.create(model="tiny", input="=s", stream=True, previous_response_id=second.id)
    third = [event async for event in stream][-1].response
    assert (await client.responses.retrieve(third.id)).id == third.id
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(whole.id)
    other = client.with_options(api_key="other")
    for call in (other.responses.retrieve(first.id), other.responses.delete(first.id)):
        with pytest.raises(openai.NotFoundError):
            await call
    with pytest.raises(openai.NotFoundError) as missing:
        await other.responses.create(model="tiny", input="a", previous_response_id=first.id)
    assert (missing.value.param, missing.value.code) == ("previous_response_id", "previous_response_not_found")
    assert f"Response with id '{first.id}' not found." in missing.value.message
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        await client.responses.cancel(first.id)
    await client.responses.delete(first.id)
    for gone in (client.responses.retrieve(first.id), client.responses.cancel(first.id)):
        with pytest.raises(openai.NotFoundError):
            await gone


async def test_counting(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model="tiny", input="=one", instructions="be brief")
    count = await client.responses.input_tokens.count(model="tiny", input="=one", instructions="be brief")
    assert (count.object, count.input_tokens) == ("response.input_tokens", first.usage.input_tokens)
    goes_on: dict[str, Any] = {"model": "tiny", "input": "=two", "previous_response_id": first.id}
    second = await client.responses.create(**goes_on)
    assert (await client.responses.input_tokens.count(**goes_on)).input_tokens == second.usage.input_tokens
    with pytest.raises(openai.NotFoundError):
        await client.responses.input_tokens.count(model="tiny", input="a", previous_response_id="resp_none")


async def test_errors(client: openai.AsyncOpenAI) -> None:
    create = client.responses.create
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"background": True, "store": False}, "background"),
        ({"truncation": "other"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ]
    for fields, param in wrong:
        with pytest.raises(openai.BadRequestError) as caught:
            await create(**{"model": "tiny", "input": "a", **fields})
        assert caught.value.param.startswith(param), caught.value
    with pytest.raises(openai.NotFoundError):
        await create(model="other", input="a")


async def test_an_error_in_the_middle_of_a_stream(model_path: Path) -> None:
    settings = ServerSettings(port=0, served_model_name=["tiny"])
    async with (
        serving(model_path, settings, executor="failing", live=True) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = await client.responses.create(model="tiny", input="=" + "a" * 90, stream=True)
        last = [event async for event in stream][-1]
        assert (last.type, last.response.status) == ("response.failed", "failed")
        assert "the engine core failed" in last.response.error.message


async def test_leaving_frees_the_blocks(live: Served) -> None:
    name = live.context.model_names[0]
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
        stream = await client.responses.create(model=name, input="=" + "a" * 99, stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        await live.until_idle()
        whole = asyncio.ensure_future(client.responses.create(model=name, input="=" + "b" * 99))
        await live.until_running(1)
        whole.cancel()
        await live.until_idle()


def test_the_synchronous_store_is_bounded() -> None:
    def stored(body: bytes) -> StoredResponse:
        return StoredResponse(body)

    store = ResponseStore(3, 1000)
    for number in range(5):
        store.put("me", str(number), stored(b"x" * 10))
    assert [store.find_response("me", str(number)) is not None for number in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    store.put("me", "4", stored(b"y" * 20))
    assert store.num_bytes == 14 + 14 + 24
    store.put("me", "large", stored(b"z" * 988))
    assert (len(store), store.num_bytes) == (1, 992)
    store.put("me", "too large", stored(b"z" * 1000))
    assert (len(store), store.find_response("me", "too large")) == (1, None)
    assert store.remove("me", "large")
    assert (store.num_bytes, store.remove("me", "large")) == (0, False)


async def test_the_store_knows_what_is_being_made() -> None:
    def begun(maker: int, num_bytes: int = 4, events: list[bytes] | None = None) -> StoredResponse:
        items = StoredItems(Listing(b" " * (num_bytes - 2)))
        return StoredResponse(b'{"status":"queued"}', items, False, True, events, maker)

    store = ResponseStore(3, 1000)
    assert store.begin_response("me", "a", begun(1)) is None
    assert store.begin_response("me", "a", begun(2)) is ResponseRejection.IN_USE
    assert store.begin_response("me", "b", begun(2, 999)) is ResponseRejection.NO_ROOM
    assert [store.begin_response("me", name, begun(2, events=[])) for name in "bc"] == [None, None]
    assert store.begin_response("me", "d", begun(1)) is ResponseRejection.NO_ROOM
    assert (store.find_response("me", "a"), len(store)) == (begun(1), 0)

    made = StoredResponse(b"{}")
    store.keep_finished("me", "a", 2, made)  # not by its maker
    assert len(store) == 0
    store.keep_finished("me", "a", 1, made)
    assert (store.find_response("me", "a"), len(store)) == (made, 1)
    assert store.remove("me", "b")
    store.keep_finished("me", "b", 2, made)  # deleted meanwhile
    assert store.find_response("me", "b") is None

    store.end_maker(2, "why")
    lost = store.find_response("me", "c")
    assert lost is not None
    assert (msgspec.json.decode(lost.body)["status"], lost.maker, lost.can_continue) == ("failed", None, False)
    [event] = [event async for event in lost.follow(7)]
    data = msgspec.json.decode(event.partition(b"data: ")[2])
    assert (data["type"], data["sequence_number"]) == ("response.failed", 7)
    assert data["response"]["error"] == {"code": "server_error", "message": "why"}


def to_chat(**fields: Any) -> dict[str, Any]:
    request = msgspec.convert({"input": "hi", **fields}, ResponsesRequest)
    return {**request.to_chat(), "messages": chat_messages_of(items_of(request.input))}


def test_a_conversation_with_tools_as_a_chat() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    chat = to_chat(
        instructions="short",
        input=[
            {"role": "user", "content": "weather?"},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "let me see"}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Rome"}'},
            {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"city":"Oslo"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "sun"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
            {"role": "assistant", "content": "done"},
            {"role": "assistant", "content": "really"},
        ],
        tools=[{"type": "function", "name": "weather", "parameters": schema, "strict": True}],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "n", "schema": schema}},
        max_output_tokens=7,
    )

    def call(name: str, city: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": "weather", "arguments": {"city": city}}}

    assert chat["messages"] == [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "let me see",
            "reasoning": "hm",
            "tool_calls": [call("c1", "Rome"), call("c2", "Oslo")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "rain"}]},
        {"role": "assistant", "content": "done"},
        {"role": "assistant", "content": "really"},
    ]
    function = {"name": "weather", "parameters": schema, "strict": True}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert (chat["parallel_tool_calls"], chat["reasoning_effort"], chat["max_completion_tokens"]) == (False, "low", 7)
    assert chat["response_format"]["json_schema"] == {"name": "n", "schema": schema, "strict": True}


def test_vllms_fields() -> None:
    """A chat has them under the same names, or they are refused."""
    fields = {
        "logit_bias": {5: 1.0},
        "stop_token_ids": [7],
        "structured_outputs": {"regex": "a"},
        "include_reasoning": False,
    }
    flags = dict.fromkeys(("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"), False)
    assert (fields | flags).items() <= to_chat(**fields, **flags).items()
    for name in ("previous_input_messages", "kv_transfer_params"):
        assert name in ResponsesRequest.UNSUPPORTED


def test_choices_of_tools() -> None:
    tools = [{"type": "function", "name": "f"}]
    assert to_chat(tools=tools)["tool_choice"] == "auto"
    assert "tool_choice" not in to_chat()
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
    assert to_chat(tools=tools, tool_choice=allowed)["tool_choice"]["allowed_tools"]["mode"] == "required"
    with pytest.raises(UserError):
        to_chat(tools=tools, tool_choice={"type": "mcp"})


def test_functions_of_namespaces_as_a_chat() -> None:
    """They are called namespace__name, and chosen by that or by a name that no other tool has."""
    files, web = (
        {
            "type": "namespace",
            "name": space,
            "description": "d",
            "tools": [{"type": "function", "name": name} for name in names],
        }
        for space, names in (("files", ("read", "list")), ("web", ("read", "open")))
    )
    tools = [files, {"type": "function", "name": "list"}, web]
    called = {"type": "function_call", "call_id": "c", "namespace": "web", "name": "read", "arguments": "{}"}
    chat = to_chat(tools=tools, input=[called, {"type": "function_call_output", "call_id": "c", "output": "x"}])
    names = [tool["function"]["name"] for tool in chat["tools"]]
    assert names == ["files__read", "files__list", "list", "web__read", "web__open"]
    assert chat["messages"][0]["tool_calls"][0]["function"]["name"] == "web__read"
    for name, meant in (("open", "web__open"), ("web__read", "web__read"), ("list", "list"), ("other", "other")):
        choice = to_chat(tools=tools, tool_choice={"type": "function", "name": name})["tool_choice"]
        assert choice["function"]["name"] == meant
    for wrong in (
        {"tools": tools, "tool_choice": {"type": "function", "name": "read"}},
        {"tools": [{"type": "namespace", "name": "empty"}]},
        {"tools": [{"type": "namespace", "name": "deep", "tools": [files]}]},
        {"tools": [{"type": "function", "name": "f", "tools": []}]},
    ):
        with pytest.raises((UserError, msgspec.ValidationError)):
            to_chat(**wrong)


async def test_what_the_model_was_given_and_gave(client: openai.AsyncOpenAI, fast: Served) -> None:
    asked: Any = {"model": "tiny", "input": "=hello", "extra_body": {"enable_response_messages": True}}
    whole = await client.responses.create(**asked)
    async with client.responses.stream(**asked) as stream:
        streamed = await stream.get_final_response()
    tokenizer = fast.context.tokenizer
    for answer in (whole, streamed):
        [given], [gave] = answer.input_messages, answer.output_messages
        assert given["type"] == gave["type"] == "raw_message_tokens"
        assert given["message"] == tokenizer.decode(given["tokens"], skip_special_tokens=False)
        assert "=hello" in given["message"]
        assert len(given["tokens"]) == answer.usage.input_tokens
        assert (gave["message"], len(gave["tokens"])) == (answer.output_text, answer.usage.output_tokens)
    assert not hasattr(await client.responses.create(model="tiny", input="=a"), "input_messages")
