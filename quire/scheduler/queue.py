"""Requests that wait: first come, first served; a preempted request goes back to its place."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator

from quire.request import Request


class RequestQueue:
    """Ordered by arrival, with removal of any request in constant time."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()
        self._returned: set[str] = set()

    def __len__(self) -> int:
        return len(self._requests)

    def append(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def put_back(self, request: Request) -> None:
        """Return a request that ran, preempted or with its leader aborted: before all that arrived later."""
        self._returned.add(request.request_id)
        arrival = request.sequences[0].seq_id
        earlier = list(itertools.takewhile(lambda other: other.sequences[0].seq_id < arrival, self))
        for other in (request, *reversed(earlier)):
            self._requests[other.request_id] = other
            self._requests.move_to_end(other.request_id, last=False)

    def remove(self, request: Request) -> None:
        """Remove a request; it is no error if it is not here."""
        self._requests.pop(request.request_id, None)
        self._returned.discard(request.request_id)

    @property
    def num_returned(self) -> int:
        """How many of those that wait ran before."""
        return len(self._returned)

    def returned(self) -> Iterator[Request]:
        """Those that ran before, in no particular order."""
        return (self._requests[request_id] for request_id in self._returned)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())
