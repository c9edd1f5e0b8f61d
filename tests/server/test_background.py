"""Responses in the background: fetched later, streamed again, cancelled; and what the store tells of conversations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from quire.errors import InternalError
from quire.server.background import BackgroundResponses, ResponseProgress
from quire.server.background_elsewhere import ResponseElsewhere, answer_question
from quire.server.errors import ApiError
from quire.server.protocol.response_items import StoredItems
from quire.server.response_store import OwnResponses, ResponseRejection, ResponseStore, StoredResponse
from quire.server.settings import ServerSettings
from tests.server.conftest import Served, serving

LONG = "=" + "a" * 99
"""Takes the very slow engine 40 seconds: it is always met at work."""


def settings(**changes: Any) -> ServerSettings:
    return ServerSettings(port=0, api_key=["key", "other"], served_model_name=["tiny"], **changes)


def client_of(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="key", max_retries=0)


@pytest.fixture
async def client(model_path: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    async with serving(model_path, settings(), live=True) as served, client_of(served) as client:
        yield client


async def ended(client: openai.AsyncOpenAI, response_id: str) -> Any:
    while (found := await client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        await asyncio.sleep(0.005)
    return found


async def test_a_response_is_fetched_later(client: openai.AsyncOpenAI) -> None:
    headers = {"X-Request-Id": "mine"}
    begun = await client.responses.create(model="tiny", input="=hello", background=True, extra_headers=headers)
    again = await client.responses.create(model="tiny", input="=again", extra_headers=headers)
    assert begun.id.startswith("resp_mine-")
    assert again.id.startswith("resp_mine-")
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    answer = await ended(client, begun.id)
    assert (answer.status, answer.output_text, answer.usage.output_tokens) == ("completed", "hello", 6)
    assert (await client.responses.cancel(begun.id)).status == "completed"
    second = await client.responses.create(model="tiny", input="=more", previous_response_id=begun.id)
    assert second.usage.input_tokens > answer.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="streamed"):
        await client.responses.retrieve(begun.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        await client.responses.cancel(second.id)


async def test_a_stream_is_taken_up_again(client: openai.AsyncOpenAI) -> None:
    stream = await client.responses.create(model="tiny", input="=abcdef", background=True, stream=True)
    first = [await anext(stream) for _ in range(5)]
    await stream.close()  # hanging up ends nothing
    assert [event.type for event in first[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert (first[0].response.status, first[2].response.status) == ("queued", "in_progress")
    name = first[0].response.id
    rest = [event async for event in await client.responses.retrieve(name, stream=True, starting_after=4)]
    again = [event async for event in await client.responses.retrieve(name, stream=True)]
    assert [event.sequence_number for event in again] == list(range(len(again)))
    assert [*first, *rest] == again
    assert (again[-1].type, again[-1].response.output_text) == ("response.completed", "abcdef")
    other = client.with_options(api_key="other")
    with pytest.raises(openai.NotFoundError):
        await other.responses.retrieve(name, stream=True)
    for query in ({"stream": "maybe"}, {"starting_after": "0"}, {"stream": "true", "starting_after": "-1"}):
        with pytest.raises(openai.BadRequestError):
            await client.responses.retrieve(name, extra_query=query)


async def test_what_is_wrong_is_told_later(client: openai.AsyncOpenAI) -> None:
    begun = await client.responses.create(model="tiny", input="a" * 5000, background=True)
    answer = await ended(client, begun.id)
    assert (answer.status, answer.error.code) == ("failed", "invalid_prompt")
    assert "tokens" in answer.error.message
    with pytest.raises(openai.BadRequestError, match="it has no end"):
        await client.responses.create(model="tiny", input="a", previous_response_id=begun.id)


async def test_a_long_conversation_is_cut(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(model="tiny", input="a" * 5000, max_output_tokens=7)
    answer = await client.responses.create(
        model="tiny", input="a" * 5000 + "=end", max_output_tokens=7, truncation="auto"
    )
    assert (answer.output_text, answer.truncation) == ("end", "auto")


async def test_input_items_and_references(client: openai.AsyncOpenAI) -> None:
    call: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    given: Any = [
        {"role": "user", "content": "question"},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "42"},
        {"role": "user", "content": [{"type": "input_text", "text": "=said"}]},
    ]
    first = await client.responses.create(model="tiny", input=given)
    page = await client.responses.input_items.list(first.id, order="asc", limit=3)
    assert [item.type for item in page.data] == ["message", "function_call", "function_call_output"]
    assert page.has_more
    listed = [item async for item in client.responses.input_items.list(first.id, limit=2)]
    assert [item.id for item in listed[:0:-1]] == [item.id for item in page.data]
    assert listed[0].content[0].text == "=said"
    assert {key: getattr(listed[2], key) for key in call} == call

    second = await client.responses.create(model="tiny", input="more", previous_response_id=first.id, user="a")
    items = [item async for item in client.responses.input_items.list(second.id, order="asc")]
    assert [item.id for item in items[:5]] == [*(item.id for item in listed[::-1]), first.output[0].id]
    assert [part.text for item in items[4:] for part in item.content] == ["said", "more"]

    references: Any = [{"type": "item_reference", "id": item.id} for item in items]
    third = await client.responses.create(model="tiny", input=references)
    assert third.usage.input_tokens == second.usage.input_tokens
    assert third.output_text == second.output_text
    with pytest.raises(openai.NotFoundError) as missing:
        await client.with_options(api_key="other").responses.create(model="tiny", input=references)
    assert missing.value.param == "input[0].id"
    with pytest.raises(openai.BadRequestError):
        await client.responses.input_items.list(first.id, limit=101)
    with pytest.raises(openai.NotFoundError):
        await client.responses.input_items.list("resp_other")


async def test_cancelling_and_deleting(model_path: Path) -> None:
    async with (
        serving(model_path, settings(max_stored_responses=2), executor="very_slow", live=True) as served,
        client_of(served) as client,
    ):
        responses = client.responses
        stream = await responses.create(model="tiny", input=LONG, background=True, stream=True)
        events = [await anext(stream) for _ in range(6)]  # a piece of text among them
        name = events[0].response.id
        deleted = await responses.create(model="tiny", input=LONG, background=True)
        await served.until_running(2)
        assert (await responses.retrieve(name)).status == "in_progress"
        with pytest.raises(openai.RateLimitError):
            await responses.create(model="tiny", input=LONG, background=True)
        with pytest.raises(openai.BadRequestError, match="it has no end"):
            await responses.create(model="tiny", input="a", previous_response_id=name)
        assert len((await responses.input_items.list(name)).data) == 1

        await responses.delete(deleted.id)
        with pytest.raises(openai.NotFoundError):
            await responses.retrieve(deleted.id)
        beyond = asyncio.ensure_future(responses.retrieve(name, stream=True, starting_after=10**6))
        answer = await responses.cancel(name)
        assert answer.status == "cancelled"
        assert answer.output_text.startswith("a")
        assert answer.output[0].status == "incomplete"
        assert [event async for event in await beyond] == []
        assert await responses.retrieve(name) == answer
        assert await responses.cancel(name) == answer
        last = [event async for event in stream][-1]
        assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
        await served.until_idle()


async def test_nothing_is_made_in_the_background_without_a_store(model_path: Path) -> None:
    async with (
        serving(model_path, settings(max_stored_responses=0), live=True) as served,
        client_of(served) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="max-stored-responses"):
            await client.responses.create(model="tiny", input="a", background=True)


class OtherProcess(OwnResponses):
    """A store whose `answers` are what the maker of a response says, in order; then it has ended."""

    def __init__(self, begun: StoredResponse, *answers: ResponseProgress) -> None:
        self.found: StoredResponse | None = begun
        self.answers = list(answers)

    async def find_response(self, owner: str, response_id: str) -> StoredResponse | None:
        return self.found

    async def ask(self, maker: int, question: bytes) -> bytes | None:
        if self.answers:
            return msgspec.msgpack.encode(self.answers.pop(0))
        assert self.found is not None
        self.found = self.found.lost("why")
        return None


async def test_a_response_whose_maker_dies() -> None:
    begun = StoredResponse(b'{"status":"queued"}', StoredItems(), False, True, [], maker=2)
    store = OtherProcess(begun, ResponseProgress([b"0", b"1"], has_ended=False), ResponseProgress([], has_ended=False))
    elsewhere = ResponseElsewhere(store, "me", "resp_1", begun)
    *events, last = [event async for event in elsewhere.follow(0)]
    assert events == [b"0", b"1"]
    assert last.startswith(b'event: response.failed\ndata: {"type":"response.failed","sequence_number":2,')
    assert msgspec.json.decode(await ResponseElsewhere(OtherProcess(begun), "me", "resp_1", begun).body())["error"]
    with pytest.raises(ApiError, match="resp_1"):
        await ResponseElsewhere(Silent(None), "me", "resp_1", begun).body()
    with pytest.raises(InternalError, match="did not answer"):
        await ResponseElsewhere(Silent(begun), "me", "resp_1", begun).cancel()


class Silent(OwnResponses):
    """A store with `found`, whose maker answers nothing."""

    def __init__(self, found: StoredResponse | None) -> None:
        self.found = found

    async def find_response(self, owner: str, response_id: str) -> StoredResponse | None:
        return self.found


class KnownEarly(OwnResponses):
    """A store whose `other` process asks for a response before its maker hears that it may begin."""

    def __init__(self) -> None:
        super().__init__(ResponseStore(4, 2**20))
        self.background = BackgroundResponses(self)
        self.other = KnownToOther(self)
        self.asked: list[asyncio.Task[bytes]] = []

    async def begin_response(self, owner: str, response_id: str, response: StoredResponse) -> ResponseRejection | None:
        found = await super().begin_response(owner, response_id, response)
        elsewhere = ResponseElsewhere(self.other, owner, response_id, response)
        self.asked.append(asyncio.ensure_future(elsewhere.body()))
        for _ in range(9):
            await asyncio.sleep(0)
        return found


class KnownToOther(OwnResponses):
    """A `KnownEarly` for the other process, whose questions go to the maker."""

    def __init__(self, store: KnownEarly) -> None:
        self._maker = store

    async def find_response(self, owner: str, response_id: str) -> StoredResponse | None:
        return await self._maker.find_response(owner, response_id)

    async def ask(self, maker: int, question: bytes) -> bytes | None:
        return await answer_question(self._maker.background, question)


class NoTokens:
    """An answer that is queued until it is cancelled."""

    class Body(msgspec.Struct):
        id: str = "resp_mine"
        status: str = "queued"

    def __init__(self) -> None:
        self.body = self.Body()

    async def stream(self) -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    def cancelled(self) -> bytes:
        self.body.status = "cancelled"
        return b""

    def stored(self, _: Any) -> StoredResponse:
        return StoredResponse(msgspec.json.encode(self.body))


async def test_a_response_that_another_process_asks_for_as_it_begins() -> None:
    """Its id may be its client's own choice (`request_id`)."""
    store, answer = KnownEarly(), NoTokens()
    conversation: Any = StoredItems().before
    made = await store.background.start("me", answer, conversation, keeps_events=False)  # type: ignore[arg-type]
    [asked] = store.asked
    assert msgspec.json.decode(await asked)["status"] == "queued"
    with pytest.raises(ApiError, match="is being made"):
        await store.background.start("me", answer, conversation, keeps_events=False)  # type: ignore[arg-type]
    await made.cancel()
    await made.settle()


async def test_an_id_of_a_deleted_response_may_be_taken_at_once() -> None:
    """The first one ends behind the start of the second."""
    store = OwnResponses(ResponseStore(4, 2**20))
    background = BackgroundResponses(store)
    conversation: Any = StoredItems().before
    first = await background.start("me", NoTokens(), conversation, keeps_events=False)  # type: ignore[arg-type]
    await asyncio.sleep(0)  # it has begun
    await store.remove("me", "resp_mine")
    assert background.delete("me", "resp_mine")
    second = await background.start("me", NoTokens(), conversation, keeps_events=False)  # type: ignore[arg-type]
    await first.is_kept.wait()
    assert background.find_response("me", "resp_mine") is second
    found = await store.find_response("me", "resp_mine")
    assert found is not None
    assert found.maker is not None, "it is still being made"
    await second.cancel()
    await second.settle()
    found = await store.find_response("me", "resp_mine")
    assert found is not None
    assert msgspec.json.decode(found.body)["status"] == "cancelled"
