"""Responses of /v1/responses that are made whether their clients wait for them or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from quire.server.errors import ApiError, invalid_request, overloaded
from quire.server.response_answer import Conversation, ResponseAnswer
from quire.server.response_store import Responses

RETRY_SECONDS = 10


class BackgroundResponse:
    """One response in a task of its own. events: what it has streamed so far, where it may be streamed; else None."""

    def __init__(self, answer: ResponseAnswer, conversation: Conversation, *, keeps_events: bool) -> None:
        self.answer, self.conversation = answer, conversation
        self.events: list[bytes] | None = [] if keeps_events else None
        self.task = asyncio.ensure_future(self._run())
        self._has_ended = False
        self.is_kept = asyncio.Event()
        """Whether the response is stored, where it is to be."""
        self._news = asyncio.Event()

    async def _run(self) -> None:
        async with aclosing(self.answer.stream()) as events:
            async for event in events:
                self._add(event)

    def _add(self, event: bytes) -> None:
        if self.events is not None:
            self.events.append(event)
            self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def cancel(self) -> None:
        """End it, and wait until `end` has been called."""
        self.task.cancel()
        while not self._has_ended:
            await self._news.wait()

    def end(self) -> None:
        """Called when the task is done: a response that did not come to its own end says why."""
        if self.task.cancelled():
            self._add(self.answer.cancelled())
        elif (error := self.task.exception()) is not None:
            self._add(self.answer.failed(error))
        self._has_ended = True
        self._wake()

    async def follow(self, first: int) -> AsyncGenerator[bytes, None]:
        """The events from number `first` on, as they come, to the last."""
        assert self.events is not None
        while True:
            for event in self.events[first:]:
                first += 1
                yield event
            if first == len(self.events):
                if self._has_ended:
                    return
                await self._news.wait()


class BackgroundResponses:
    """The responses that are being made, by owner and id. At their end they move to the store, whose bounds hold for
    those that are being made too: as many of them, and as many bytes of conversations."""

    def __init__(self, store: Responses, max_entries: int, max_bytes: int) -> None:
        self._store = store
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._keeping: set[asyncio.Task[None]] = set()
        self._running: dict[tuple[str, str], BackgroundResponse] = {}

    def find_response(self, owner: str, response_id: str) -> BackgroundResponse | None:
        return self._running.get((owner, response_id))

    def start(
        self, owner: str, answer: ResponseAnswer, conversation: Conversation, *, keeps_events: bool
    ) -> BackgroundResponse:
        """Raises ApiError: 400 for an id that is in use, 429 where there is no room."""
        response_id = answer.body.id
        if (owner, response_id) in self._running:
            raise invalid_request(f"the response {response_id!r} is being made", param="request_id")
        self._check_room(conversation)
        running = BackgroundResponse(answer, conversation, keeps_events=keeps_events)
        self._running[owner, response_id] = running
        running.task.add_done_callback(lambda _: self._begin_to_keep(owner, response_id, running))
        return running

    def _check_room(self, conversation: Conversation) -> None:
        num_bytes = sum(len(running.conversation.items) for running in self._running.values())
        if len(self._running) >= self._max_entries or num_bytes + len(conversation.items) > self._max_bytes:
            raise overloaded("too many responses are being made in the background", RETRY_SECONDS)

    def _begin_to_keep(self, owner: str, response_id: str, running: BackgroundResponse) -> None:
        running.end()
        keeping = asyncio.ensure_future(self._keep(owner, response_id, running))
        self._keeping.add(keeping)
        keeping.add_done_callback(self._keeping.discard)

    async def _keep(self, owner: str, response_id: str, running: BackgroundResponse) -> None:
        """Store a response, unless it was deleted, and only then count it no longer among those that are being made."""
        key = (owner, response_id)
        try:
            if self._running.get(key) is running:
                stored = running.answer.stored(running.conversation)
                stored = stored._replace(in_background=True, events=running.events)
                await self._store.put(owner, response_id, stored)
                if self._running.get(key) is running:
                    del self._running[key]
                else:  # deleted meanwhile
                    await self._store.remove(owner, response_id)
        finally:
            running.is_kept.set()

    def delete(self, owner: str, response_id: str) -> bool:
        """End a response that is being made, and forget it. Whether there was one."""
        running = self._running.pop((owner, response_id), None)
        if running is None:
            return False
        running.task.cancel()
        return True

    def close(self) -> None:
        for running in self._running.values():
            running.task.cancel()


def not_streamed(response_id: str) -> ApiError:
    return invalid_request(
        f"only responses made with background=true and stream=true are streamed again, {response_id!r} was not",
        param="stream",
    )
