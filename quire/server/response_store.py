"""The responses that clients can go on from: in memory, bounded in number and bytes, the oldest leave first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

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
