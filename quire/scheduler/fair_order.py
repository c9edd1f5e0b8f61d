"""Fair order of clients: the place of a request among the waiting ones of other clients (docs/scheduling.md).

Clients are served in rounds: between two requests of one client each other client has one turn. A request's place is
decided once, at its arrival, by the time at which it counts as arrived (`Request.order_time`). A client's first request
waits for at most one request of each other client. Rounds are of requests of one priority.
"""

from __future__ import annotations

import bisect
import math

from quire.decoding.sequence import OrderKey, Request

LEAST_GAP = 1e-6
"""Least seconds between order times of one client's requests, which leaves room for another client's."""

NO_REQUEST: OrderKey = (-math.inf, 0)
"""Order key before all others."""


class FairOrder:
    """Waiting requests that have not run yet, by priority and client, in order."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[str, list[Request]]] = {}

    def order_time(self, client: str, priority: int, now: float) -> float:
        """Time at which a request that arrives now counts as arrived. One binary search per waiting client. Seconds of
        the engine's clock."""
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
        self._waiting.setdefault(request.priority, {}).setdefault(request.client, []).append(request)

    def discard(self, request: Request) -> None:
        """Remove a request that runs or has ended."""
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
