"""Turns between clients: where in the order a request of one client comes among the waiting ones of others.

The first waiting request of a client comes behind the first waiting ones of the others, and from there on each other
client has one turn between two of its own: they are served in rounds. A request's place is decided once, when it
arrives, by the time at which it counts as arrived (`Request.order_time`), and never changes. A client that waits
alone has its requests served in the order of their arrival, at the times of their arrival.

So a request that is its client's first waits for at most one request of each other client, however many they have
queued, and nothing that comes later goes before it. Rounds are of requests of one priority; between priorities the
order is as ever (docs/scheduling.md).
"""

from __future__ import annotations

import bisect
import math

from quire.decoding.sequence import OrderKey, Request

LEAST_GAP = 1e-6
"""Seconds between the order times of one client's requests, so that one of another client has room between them."""

NO_REQUEST: OrderKey = (-math.inf, 0)
"""Before all others."""


class FairOrder:
    """The waiting requests that have not run yet, by priority and client, in their order."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[str, list[Request]]] = {}

    def order_time(self, client: str, priority: int, now: float) -> float:
        """When a request that arrives now counts as arrived. A binary search for each client that waits."""
        clients = self._waiting.get(priority, {})
        own = clients.get(client, [])
        last = own[-1].order_key if own else NO_REQUEST
        ahead = []
        for name, waiting in clients.items():
            place = bisect.bisect_right(waiting, last, key=_order_key)
            if name != client and place < len(waiting):
                ahead.append(waiting[place].order_time)
        time = max(ahead) if ahead else now
        return max(time, own[-1].order_time + LEAST_GAP) if own else time

    def add_request(self, request: Request) -> None:
        """A request has arrived, and waits."""
        self._waiting.setdefault(request.priority, {}).setdefault(request.client, []).append(request)

    def discard(self, request: Request) -> None:
        """It runs, or is over."""
        clients = self._waiting.get(request.priority, {})
        waiting = clients.get(request.client, [])
        if request in waiting:
            waiting.remove(request)
            if not waiting:
                del clients[request.client]
            if not clients:
                del self._waiting[request.priority]


def _order_key(request: Request) -> OrderKey:
    return request.order_key
