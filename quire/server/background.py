"""Responses of /v1/responses that continue when their client leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import NamedTuple, Protocol

import msgspec

from quire.server.errors import ApiError, invalid_request, overloaded
from quire.server.protocol.response_items import Listing, StoredItems
from quire.server.response_answer import ResponseAnswer
from quire.server.response_store import ResponseRejection, Responses, StoredResponse

RETRY_SECONDS = 10
_UNFINISHED = ("queued", "in_progress")


class AnyResponse(Protocol):
    """Response of /v1/responses, stored or in the making, as its routes read and end it. is_streamed: its events can be
    read (`follow`)."""

    @property
    def is_streamed(self) -> bool: ...

    async def body(self) -> bytes:
        """Response as JSON."""

    def follow(self, first: int) -> AsyncGenerator[bytes, None]:
        """Yield the events from number `first` on, as they come."""

    async def cancel(self) -> bytes:
        """End the response and return its JSON body."""

    async def settle(self) -> None:
        """Wait until an ended response is stored."""


class ResponseProgress(NamedTuple):
    """Events so far of a response being made. has_ended: `events` includes the last one."""

    events: list[bytes]
    has_ended: bool


async def follow(progress: Callable[[int], Awaitable[ResponseProgress]], first: int) -> AsyncGenerator[bytes, None]:
    """Yield events as they come. progress: returns the events from a given number on."""
    has_ended = False
    while not has_ended:
        events, has_ended = await progress(first)
        for event in events:
            first += 1
            yield event


class FinishedResponse:
    def __init__(self, stored: StoredResponse) -> None:
        self._stored = stored

    @property
    def is_streamed(self) -> bool:
        return self._stored.events is not None

    async def body(self) -> bytes:
        return self._stored.body

    def follow(self, first: int) -> AsyncGenerator[bytes, None]:
        return self._stored.follow(first)

    async def cancel(self) -> bytes:
        """Body unchanged. Raises ApiError if the response was not made in the background."""
        if not self._stored.in_background:
            raise invalid_request(
                "Cannot cancel a synchronous response: it was not made in the background", param="response_id"
            )
        return self._stored.body

    async def settle(self) -> None:
        pass


class BackgroundResponse:
    """Response of /v1/responses with `background`, made by a task of its own."""

    def __init__(self, answer: ResponseAnswer, conversation: Listing, *, keeps_events: bool) -> None:
        """answer: makes the response. keeps_events: the response may be streamed."""
        self._answer, self._conversation = answer, conversation
        self._events: list[bytes] | None = [] if keeps_events else None
        self._has_ended = False
        self._news = asyncio.Event()
        self.is_kept = asyncio.Event()
        """Set once the response is stored, if it is to be."""
        self.task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        self.task = asyncio.ensure_future(self._run())
        return self.task

    async def _run(self) -> None:
        async with aclosing(self._answer.stream()) as events:
            async for event in events:
                self._add(event)

    def _add(self, event: bytes) -> None:
        if self._events is not None:
            self._events.append(event)
            self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def end(self) -> None:
        """Called when the task is done; a cancelled or failed response gets an event that says so."""
        assert self.task is not None
        if self.task.cancelled():
            self._add(self._answer.cancelled())
        elif (error := self.task.exception()) is not None:
            self._add(self._answer.failed(error))
        self._has_ended = True
        self._wake()

    def begun(self, maker: int) -> StoredResponse:
        """Entry in the store while the response is being made."""
        events: list[bytes] | None = [] if self.is_streamed else None
        body = msgspec.json.encode(self._answer.body)
        return StoredResponse(body, StoredItems(self._conversation), False, True, events, maker)

    def stored(self) -> StoredResponse:
        stored = self._answer.stored(self._conversation)
        return stored._replace(in_background=True, events=self._events)

    @property
    def is_streamed(self) -> bool:
        return self._events is not None

    async def body(self) -> bytes:
        return msgspec.json.encode(self._answer.body)

    def follow(self, first: int) -> AsyncGenerator[bytes, None]:
        return follow(self.progress, first)

    async def progress(self, first: int, seconds: float | None = None) -> ResponseProgress:
        """Events from number `first` on; waits for one, at most `seconds`."""
        assert self._events is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while len(self._events) <= first and not self._has_ended:
                    await self._news.wait()
        return ResponseProgress(self._events[first:], self._has_ended)

    def end_early(self) -> None:
        assert self.task is not None
        self.task.cancel()

    async def cancel(self) -> bytes:
        self.end_early()
        while not self._has_ended:
            await self._news.wait()
        return await self.body()

    async def settle(self) -> None:
        if self._answer.body.status not in _UNFINISHED:
            await self.is_kept.wait()


class BackgroundResponses:
    """Responses that this process is making, by owner and id. They move to the store when they end."""

    def __init__(self, store: Responses) -> None:
        self._store = store
        self._keeping: set[asyncio.Task[None]] = set()
        self._running: dict[tuple[str, str], BackgroundResponse] = {}
        self._starting: dict[tuple[str, str], list[asyncio.Event]] = {}
        """Starts that the store may know first."""

    def find_response(self, owner: str, response_id: str) -> BackgroundResponse | None:
        return self._running.get((owner, response_id))

    async def find_started(self, owner: str, response_id: str) -> BackgroundResponse | None:
        """Wait for starts under way, then find the response."""
        for start in list(self._starting.get((owner, response_id), ())):
            await start.wait()
        return self.find_response(owner, response_id)

    async def start(
        self, owner: str, answer: ResponseAnswer, conversation: Listing, *, keeps_events: bool
    ) -> BackgroundResponse:
        """Start to make a response. Raises ApiError: 400 for an id in use, 429 if the store is full."""
        response_id = answer.body.id
        response = BackgroundResponse(answer, conversation, keeps_events=keeps_events)
        with self._noting_start((owner, response_id)):
            await self._begin(owner, response_id, response)
            self._running[owner, response_id] = response
            task = response.start()
        task.add_done_callback(lambda _: self._begin_to_keep(owner, response_id, response))
        return response

    @contextlib.contextmanager
    def _noting_start(self, key: tuple[str, str]) -> Iterator[None]:
        has_ended = asyncio.Event()
        starts = self._starting.setdefault(key, [])
        starts.append(has_ended)
        try:
            yield
        finally:
            has_ended.set()
            starts.remove(has_ended)
            if not starts:
                del self._starting[key]

    async def _begin(self, owner: str, response_id: str, response: BackgroundResponse) -> None:
        match await self._store.begin_response(owner, response_id, response.begun(self._store.maker)):
            case ResponseRejection.IN_USE:
                raise invalid_request(f"the response {response_id!r} is being made", param="request_id")
            case ResponseRejection.NO_ROOM:
                raise overloaded("too many responses are being made in the background", RETRY_SECONDS)

    def _begin_to_keep(self, owner: str, response_id: str, response: BackgroundResponse) -> None:
        response.end()
        keeping = asyncio.ensure_future(self._keep(owner, response_id, response))
        self._keeping.add(keeping)
        keeping.add_done_callback(self._keeping.discard)

    async def _keep(self, owner: str, response_id: str, response: BackgroundResponse) -> None:
        key = owner, response_id
        try:
            if self._running.get(key) is response:  # not deleted; the id may be another response's since
                await self._store.keep_finished(owner, response_id, response.stored())
        finally:
            if self._running.get(key) is response:
                del self._running[key]
            response.is_kept.set()

    def delete(self, owner: str, response_id: str) -> bool:
        """End a deleted response; False if another process was making it."""
        response = self._running.pop((owner, response_id), None)
        if response is None:
            return False
        response.end_early()
        return True

    def close(self) -> None:
        for response in self._running.values():
            response.end_early()


def not_streamed(response_id: str) -> ApiError:
    return invalid_request(
        f"only responses made with background=true and stream=true are streamed again, {response_id!r} was not",
        param="stream",
    )


def not_found(response_id: str, param: str = "response_id", code: str | None = None) -> ApiError:
    message = (
        f"Response with id {response_id!r} not found. It never was stored, was deleted, or had to leave for later ones"
    )
    return invalid_request(message, param=param, code=code, status=404)
