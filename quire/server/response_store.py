"""The responses that clients can go on from: in memory, bounded in number and bytes, the oldest leave first. Of
several API processes the parent has them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec


class StoredResponse(NamedTuple):
    """body: the response as JSON. items: the whole conversation up to its end as JSON, as /input_items lists it, of
    which `num_input` are before the answer. can_continue: whether it ended in its own time. in_background: whether it
    was made so. events: of a response that was streamed in the background."""

    body: bytes
    items: bytes
    num_input: int
    can_continue: bool = True
    in_background: bool = False
    events: Sequence[bytes] | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.items) + sum(map(len, self.events or ()))

    def conversation(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = msgspec.json.decode(self.items)
        return items


class ResponseStore:
    """By owner and id: what a client has stored, only the same client reads."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self.max_entries, self.max_bytes = max_entries, max_bytes
        self._entries: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, owner: str, response_id: str, response: StoredResponse) -> None:
        """Keep a response, and forget the oldest ones where there is no room. One that is larger than the whole store
        is not kept."""
        self.remove(owner, response_id)
        if response.num_bytes > self.max_bytes or not self.max_entries:
            return
        self._entries[owner, response_id] = response
        self.num_bytes += response.num_bytes
        while len(self._entries) > self.max_entries or self.num_bytes > self.max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.num_bytes -= oldest.num_bytes

    def find_response(self, owner: str, response_id: str) -> StoredResponse | None:
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

    async def put(self, owner: str, response_id: str, response: StoredResponse) -> None: ...

    async def find_response(self, owner: str, response_id: str) -> StoredResponse | None: ...

    async def remove(self, owner: str, response_id: str) -> bool: ...


class OwnResponses:
    """Responses that this process has itself."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def put(self, owner: str, response_id: str, response: StoredResponse) -> None:
        self._store.put(owner, response_id, response)

    async def find_response(self, owner: str, response_id: str) -> StoredResponse | None:
        return self._store.find_response(owner, response_id)

    async def remove(self, owner: str, response_id: str) -> bool:
        return self._store.remove(owner, response_id)


class _Put(msgspec.Struct, tag="put"):
    owner: str
    response_id: str
    response: StoredResponse


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

    async def put(self, owner: str, response_id: str, response: StoredResponse) -> None:
        await self._ask(msgspec.msgpack.encode(_Put(owner, response_id, response)))

    async def find_response(self, owner: str, response_id: str) -> StoredResponse | None:
        answer = await self._ask(msgspec.msgpack.encode(_Find(owner, response_id)))
        return msgspec.msgpack.decode(answer, type=StoredResponse | None)

    async def remove(self, owner: str, response_id: str) -> bool:
        return msgspec.msgpack.decode(await self._ask(msgspec.msgpack.encode(_Remove(owner, response_id))), type=bool)


def answer_from(store: ResponseStore, message: bytes) -> bytes:
    """What the parent answers to a message of ParentsResponses."""
    result: StoredResponse | bool | None = None
    match msgspec.msgpack.decode(message, type=_Put | _Find | _Remove):
        case _Put(owner, response_id, response):
            store.put(owner, response_id, response)
        case _Find(owner, response_id):
            result = store.find_response(owner, response_id)
        case _Remove(owner, response_id):
            result = store.remove(owner, response_id)
    return msgspec.msgpack.encode(result)
