"""Responses that clients can continue, in memory, limited in number and bytes; the oldest leave first."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from quire.server.protocol.response_items import StoredItems

_encoder = msgspec.json.Encoder()


def response_event(name: str, number: int, /, **fields: Any) -> bytes:
    """Encode an event of a streamed response. number: index in the stream."""
    data = _encoder.encode({"type": name, "sequence_number": number, **fields})
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


class StoredResponse(NamedTuple):
    """body: JSON. items: conversation up to the response's end. can_continue: it
    ended normally. events: stream of a background response, empty if lost. maker: session of the API process still
    making it; the other fields then date from its beginning."""

    body: bytes
    items: StoredItems = StoredItems()
    can_continue: bool = True
    in_background: bool = False
    events: Sequence[bytes] | None = None
    maker: int | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.body) + self.items.num_bytes + sum(map(len, self.events or ()))

    async def follow(self, first: int) -> AsyncGenerator[bytes, None]:
        """Yield the events from number `first` on; only the end if the events were lost."""
        assert self.events is not None
        for event in self.events[first:]:
            yield event
        if not self.events:
            yield response_event("response.failed", first, response=msgspec.Raw(self.body))

    def lost(self, message: str) -> StoredResponse:
        """Fail a response whose maker has ended. message: reason, for the client."""
        body = msgspec.json.decode(self.body)
        body |= {"status": "failed", "error": {"code": "server_error", "message": message}}
        return self._replace(body=_encoder.encode(body), maker=None)


class ResponseRejection(enum.IntEnum):
    IN_USE = 1
    NO_ROOM = 2


class ResponseStore:
    """Responses by owner and id; only the client that stored one may read it. The limits apply to stored responses and,
    separately, to those being made."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self.max_entries, self.max_bytes = max_entries, max_bytes
        self._entries: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._making: dict[tuple[str, str], StoredResponse] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, owner: str, response_id: str, response: StoredResponse) -> None:
        """Keep a response, and drop the oldest beyond the limits. One larger than the whole store is not kept."""
        self.remove(owner, response_id)
        if response.num_bytes > self.max_bytes or not self.max_entries:
            return
        self._entries[owner, response_id] = response
        self.num_bytes += response.num_bytes
        while len(self._entries) > self.max_entries or self.num_bytes > self.max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.num_bytes -= oldest.num_bytes

    def begin_response(self, owner: str, response_id: str, response: StoredResponse) -> ResponseRejection | None:
        """Register a response that `response.maker` begins; returns the reason if it is refused."""
        if (owner, response_id) in self._making:
            return ResponseRejection.IN_USE
        num_bytes = sum(each.items.num_bytes for each in self._making.values()) + response.items.num_bytes
        if len(self._making) >= self.max_entries or num_bytes > self.max_bytes:
            return ResponseRejection.NO_ROOM
        self._making[owner, response_id] = response
        return None

    def keep_finished(self, owner: str, response_id: str, maker: int, response: StoredResponse) -> None:
        """Keep a response that `maker` has finished, unless it was deleted meanwhile."""
        begun = self._making.get((owner, response_id))
        if begun is not None and begun.maker == maker:
            self.put(owner, response_id, response)

    def end_maker(self, maker: int, message: str) -> None:
        for (owner, response_id), begun in list(self._making.items()):
            if begun.maker == maker:
                self.put(owner, response_id, begun.lost(message))

    def find_response(self, owner: str, response_id: str) -> StoredResponse | None:
        key = (owner, response_id)
        return self._making.get(key) or self._entries.get(key)

    def remove(self, owner: str, response_id: str) -> bool:
        key = (owner, response_id)
        begun, entry = self._making.pop(key, None), self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes
        return begun is not None or entry is not None


class Responses(Protocol):
    """ResponseStore of this or another process. maker: session of this process."""

    maker: int

    async def put(self, owner: str, response_id: str, response: StoredResponse) -> None: ...

    async def begin_response(
        self, owner: str, response_id: str, response: StoredResponse
    ) -> ResponseRejection | None: ...

    async def keep_finished(self, owner: str, response_id: str, response: StoredResponse) -> None: ...

    async def find_response(self, owner: str, response_id: str) -> StoredResponse | None: ...

    async def remove(self, owner: str, response_id: str) -> bool: ...

    async def ask(self, maker: int, question: bytes) -> bytes | None:
        """Ask another process that makes responses. Returns None if it has ended or could not answer."""

    def answer_with(self, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Answer the questions of other processes with `answer`. Call in the event loop."""


class OwnResponses:
    """Store of a server with one process."""

    maker = 0

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def put(self, owner: str, response_id: str, response: StoredResponse) -> None:
        self._store.put(owner, response_id, response)

    async def begin_response(self, owner: str, response_id: str, response: StoredResponse) -> ResponseRejection | None:
        return self._store.begin_response(owner, response_id, response)

    async def keep_finished(self, owner: str, response_id: str, response: StoredResponse) -> None:
        self._store.keep_finished(owner, response_id, self.maker, response)

    async def find_response(self, owner: str, response_id: str) -> StoredResponse | None:
        return self._store.find_response(owner, response_id)

    async def remove(self, owner: str, response_id: str) -> bool:
        return self._store.remove(owner, response_id)

    async def ask(self, maker: int, question: bytes) -> bytes | None:
        return None

    def answer_with(self, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        pass
