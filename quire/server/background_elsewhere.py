"""Responses that another API process makes: questions to it, and answers to its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from quire.errors import InternalError
from quire.server.background import (
    AnyResponse,
    BackgroundResponses,
    FinishedResponse,
    ResponseProgress,
    follow,
    not_found,
)
from quire.server.response_store import Responses, StoredResponse

WAIT_SECONDS = 10.0


class _Question(msgspec.Struct):
    owner: str
    response_id: str


class _Body(_Question, tag="body"):
    pass


class _Follow(_Question, tag="follow"):
    first: int


class _Cancel(_Question, tag="cancel"):
    pass


class _Settle(_Question, tag="settle"):
    pass


class _Delete(_Question, tag="delete"):
    pass


class ResponseElsewhere:
    """AnyResponse that another API process makes; read from the store if its maker no longer has it."""

    def __init__(self, store: Responses, owner: str, response_id: str, begun: StoredResponse) -> None:
        """begun: response's entry in the store."""
        assert begun.maker is not None
        self._store, self._maker = store, begun.maker
        self._key = owner, response_id
        self.is_streamed = begun.events is not None

    async def body(self) -> bytes:
        return await self._ask(_Body(*self._key), bytes) or await (await self._finished()).body()

    async def follow(self, first: int) -> AsyncGenerator[bytes, None]:
        async def progress(first: int) -> ResponseProgress:
            found: ResponseProgress | None = await self._ask(_Follow(*self._key, first), ResponseProgress)
            if found is not None:
                return found
            finished = await self._finished()
            return ResponseProgress([event async for event in finished.follow(first)], True)

        async for event in follow(progress, first):
            yield event

    async def cancel(self) -> bytes:
        return await self._ask(_Cancel(*self._key), bytes) or await (await self._finished()).cancel()

    async def settle(self) -> None:
        await self._ask(_Settle(*self._key), bytes)

    async def delete(self) -> None:
        await self._ask(_Delete(*self._key), bytes)

    async def _ask(self, question: _Question, answer: Any) -> Any:
        payload = await self._store.ask(self._maker, msgspec.msgpack.encode(question))
        return None if payload is None else msgspec.msgpack.decode(payload, type=answer | None)

    async def _finished(self) -> FinishedResponse:
        owner, response_id = self._key
        stored = await self._store.find_response(owner, response_id)
        if stored is None:
            raise not_found(response_id)
        if stored.maker is not None:
            raise InternalError("an API process did not answer for the response that it is making")
        return FinishedResponse(stored)


async def find_anywhere(
    store: Responses, background: BackgroundResponses, owner: str, response_id: str
) -> AnyResponse | None:
    own = background.find_response(owner, response_id)
    if own is not None:
        return own
    stored = await store.find_response(owner, response_id)
    if stored is None:
        return None
    if stored.maker is None:
        return FinishedResponse(stored)
    return ResponseElsewhere(store, owner, response_id, stored)


async def answer_question(background: BackgroundResponses, payload: bytes) -> bytes:
    """Answer another process's question about a response that this one is making."""
    question = msgspec.msgpack.decode(payload, type=_Body | _Follow | _Cancel | _Settle | _Delete)
    response = await background.find_started(question.owner, question.response_id)
    answer: bytes | ResponseProgress | None = None
    if response is not None:
        match question:
            case _Body():
                answer = await response.body()
            case _Follow(first=first):
                answer = await response.progress(first, WAIT_SECONDS)
            case _Cancel():
                answer = await response.cancel()
            case _Settle():
                await response.settle()
            case _Delete():
                background.delete(question.owner, question.response_id)
    return msgspec.msgpack.encode(answer)
