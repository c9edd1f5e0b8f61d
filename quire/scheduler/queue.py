"""Waiting requests in order, and requests with a time limit by deadline."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Iterator

from quire.config.scheduler import PRIORITY_SECONDS
from quire.decoding.masks import Constraint
from quire.decoding.sequence import OrderKey, Request
from quire.kv_cache.stats import EngineStats
from quire.request import EngineRequest
from quire.scheduler.fair_order import FairOrder


class RequestQueue:
    """Waiting requests sorted by `Request.order_key`, which never changes."""

    def __init__(self, priority_seconds: float = PRIORITY_SECONDS) -> None:
        self._requests: list[Request] = []
        self._returned: dict[str, Request] = {}
        self._fair_order = FairOrder()
        self._priority_seconds = priority_seconds
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._requests)

    def order_time(self, client: str, priority: int, now: float) -> float:
        return self._fair_order.order_time(client, priority, now)

    def receive(self, source: EngineRequest, now: float, constraint: Constraint | None) -> Request:
        """Make a request that arrives now, with its place in the order. It is not queued yet."""
        arrival = now if source.resume_point is None else now - source.resume_point.age
        return Request(
            source,
            arrival,
            arrival_number=next(self._arrivals),
            order_time=self.order_time(source.client, source.level, arrival),
            priority_seconds=self._priority_seconds,
            constraint=constraint,
        )

    def push(self, request: Request) -> None:
        self._fair_order.add_request(request)
        bisect.insort(self._requests, request, key=_order_key)

    def put_back(self, request: Request) -> None:
        """Insert a request that ran before: preempted, or with its leading sequence aborted."""
        self._returned[request.request_id] = request
        bisect.insort(self._requests, request, key=_order_key)

    def remove(self, request: Request) -> None:
        place = bisect.bisect_left(self._requests, request.order_key, key=_order_key)
        if place < len(self._requests) and self._requests[place] is request:
            del self._requests[place]
            if self._returned.pop(request.request_id, None) is None:
                self._fair_order.discard(request)

    @property
    def first(self) -> Request | None:
        return self._requests[0] if self._requests else None

    @property
    def num_returned(self) -> int:
        return len(self._returned)

    def report_stats(self, stats: EngineStats) -> None:
        stats.num_waiting = len(self._requests)
        stats.num_deferred = min(stats.num_deferred, stats.num_waiting)
        stats.num_preempted = len(self._returned)
        stats.num_swapped = sum(bool(request.swapped_blocks) for request in self._returned.values())

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


def _order_key(request: Request) -> OrderKey:
    return request.order_key


class Deadlines:
    """Heap of requests with a time limit by deadline, seconds of the engine's clock. Ended requests stay in it until
    their deadline."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._live: set[int] = set()
        """Arrival numbers of unfinished requests."""

    def __len__(self) -> int:
        return len(self._live)

    def watch(self, request: Request) -> None:
        timeout = request.params.timeout_s
        if timeout is not None:
            number = request.order_key[1]
            heapq.heappush(self._heap, (request.arrival_time + timeout, number, request))
            self._live.add(number)

    def discard(self, request: Request) -> None:
        self._live.discard(request.order_key[1])
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = [entry for entry in self._heap if entry[1] in self._live]
            heapq.heapify(self._heap)

    def expired(self, now: float) -> list[Request]:
        """Remove and return the live requests whose deadline has passed, the earliest first."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            _, number, request = heapq.heappop(self._heap)
            if number in self._live:
                found.append(request)
        return found
