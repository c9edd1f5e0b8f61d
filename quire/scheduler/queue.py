"""Requests that wait: first come, first served; a preempted request goes back to the front."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from quire.request import Request


class RequestQueue:
    """Ordered by arrival, with removal of any request in constant time."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def append(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def append_front(self, request: Request) -> None:
        """Put a preempted request first. The latest arrival is preempted first, so arrival order is kept."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request | None:
        return next(iter(self._requests.values()), None)

    def remove(self, request: Request) -> None:
        """Remove a request; it is no error if it is not here."""
        self._requests.pop(request.request_id, None)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())
