"""Requests with a time limit, by the moment when it is over."""

from __future__ import annotations

import heapq

from quire.request import Request


class Deadlines:
    """A heap; requests that ended before their time stay in it until they come up, or are too many."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._live: set[int] = set()
        """Arrival numbers of requests that have not ended."""

    def __len__(self) -> int:
        return len(self._live)

    def watch(self, request: Request) -> None:
        """Watch a request, if it has a time limit."""
        timeout = request.params.timeout_s
        if timeout is not None:
            number = request.order_key[1]
            heapq.heappush(self._heap, (request.arrival_time + timeout, number, request))
            self._live.add(number)

    def discard(self, request: Request) -> None:
        """The request has ended."""
        self._live.discard(request.order_key[1])
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = [entry for entry in self._heap if entry[1] in self._live]
            heapq.heapify(self._heap)

    def expired(self, now: float) -> list[Request]:
        """Requests that have not ended and whose time is over, once each, the earliest first."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            _, number, request = heapq.heappop(self._heap)
            if number in self._live:
                found.append(request)
        return found
