"""Requests that wait, in the order of their keys: a preempted request goes back to its place."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from quire.request import OrderKey, Request


class RequestQueue:
    """Sorted by `Request.order_key`, which never changes: a binary search finds the place of a request, and the
    references behind it move by one, which for thousands of them is a copy of a few kilobytes."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._returned: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, request: Request) -> None:
        bisect.insort(self._requests, request, key=_order_key)

    def put_back(self, request: Request) -> None:
        """Return a request that ran, preempted or with its leader aborted, to its place."""
        self._returned[request.request_id] = request
        self.push(request)

    def remove(self, request: Request) -> None:
        """Remove a request; it is no error if it is not here."""
        place = bisect.bisect_left(self._requests, request.order_key, key=_order_key)
        if place < len(self._requests) and self._requests[place] is request:
            del self._requests[place]
            self._returned.pop(request.request_id, None)

    @property
    def first(self) -> Request | None:
        return self._requests[0] if self._requests else None

    @property
    def num_returned(self) -> int:
        """How many of those that wait ran before."""
        return len(self._returned)

    def returned(self) -> Iterator[Request]:
        """Those that ran before, in no particular order."""
        return iter(self._returned.values())

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


def _order_key(request: Request) -> OrderKey:
    return request.order_key
