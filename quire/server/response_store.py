"""The responses that clients can go on from: in memory, bounded in number and bytes, the oldest leave first. Of several
API processes the parent has them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

import msgspec


class StoredResponse(NamedTuple):
    """body: the response as JSON. messages: the conversation up to its end, as the chat endpoint takes it."""

    body: bytes
    messages: list[dict[str, Any]]
    num_bytes: int


class ResponseStore:
    """By owner and id: what a client has stored, only the same client reads."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._entries: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, owner: str, response_id: str, body: bytes, messages: list[dict[str, Any]]) -> None:
        """Keep a response, and forget the oldest ones where there is no room. One that is larger than the whole store
        is not kept."""
        num_bytes = len(body) + len(msgspec.json.encode(messages))
        self.remove(owner, response_id)
        if num_bytes > self._max_bytes or not self._max_entries:
            return
        self._entries[owner, response_id] = StoredResponse(body, messages, num_bytes)
        self.num_bytes += num_bytes
        while len(self._entries) > self._max_entries or self.num_bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.num_bytes -= oldest.num_bytes

    def find(self, owner: str, response_id: str) -> StoredResponse | None:
        return self._entries.get((owner, response_id))

    def remove(self, owner: str, response_id: str) -> bool:
        """Whether there was one."""
        entry = self._entries.pop((owner, response_id), None)
        if entry is None:
            return False
        self.num_bytes -= entry.num_bytes
        return True


class Responses(Protocol):
    """A ResponseStore, wherever it is."""

    async def put(self, owner: str, response_id: str, body: bytes, messages: list[dict[str, Any]]) -> None: ...

    async def find(self, owner: str, response_id: str) -> StoredResponse | None: ...

    async def remove(self, owner: str, response_id: str) -> bool: ...


class OwnResponses:
    """Responses that this process has itself."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def put(self, owner: str, response_id: str, body: bytes, messages: list[dict[str, Any]]) -> None:
        self._store.put(owner, response_id, body, messages)

    async def find(self, owner: str, response_id: str) -> StoredResponse | None:
        return self._store.find(owner, response_id)

    async def remove(self, owner: str, response_id: str) -> bool:
        return self._store.remove(owner, response_id)


class _Put(msgspec.Struct, tag="put"):
    owner: str
    response_id: str
    body: bytes
    messages: list[dict[str, Any]]


class _Find(msgspec.Struct, tag="find"):
    owner: str
    response_id: str


class _Remove(msgspec.Struct, tag="remove"):
    owner: str
    response_id: str


class ParentsResponses:
    """Responses that the parent of this process has. ask: sends it a message for `answer_from` and returns the answer.
    Raises what `ask` raises."""

    def __init__(self, ask: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._ask = ask

    async def put(self, owner: str, response_id: str, body: bytes, messages: list[dict[str, Any]]) -> None:
        await self._ask(msgspec.msgpack.encode(_Put(owner, response_id, body, messages)))

    async def find(self, owner: str, response_id: str) -> StoredResponse | None:
        answer = await self._ask(msgspec.msgpack.encode(_Find(owner, response_id)))
        return msgspec.msgpack.decode(answer, type=StoredResponse | None)

    async def remove(self, owner: str, response_id: str) -> bool:
        return msgspec.msgpack.decode(await self._ask(msgspec.msgpack.encode(_Remove(owner, response_id))), type=bool)


def answer_from(store: ResponseStore, message: bytes) -> bytes:
    """What the parent answers to a message of ParentsResponses."""
    result: StoredResponse | bool | None = None
    match msgspec.msgpack.decode(message, type=_Put | _Find | _Remove):
        case _Put(owner, response_id, body, messages):
            store.put(owner, response_id, body, messages)
        case _Find(owner, response_id):
            result = store.find(owner, response_id)
        case _Remove(owner, response_id):
            result = store.remove(owner, response_id)
    return msgspec.msgpack.encode(result)
