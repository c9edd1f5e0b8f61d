"""Routers: they choose a request's replica from what a router knows, the replicas' reports and its own choices.

A report says how many requests each replica has. From one report to the next a router counts what it sends; what
finishes meanwhile it learns with the report. The engine reports before each request (quire/engine/fleet.py), the
simulator at a fixed interval.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from quire.errors import UserError, nearest_name
from quire.request import EngineRequest

SLACK = 1.25
"""A replica takes requests of its prefixes while its live requests are at most SLACK times the mean ..."""
SLACK_REQUESTS = 4
"""... plus this number."""
PREFIX_TOKENS = 256
"""First tokens by which requests that begin alike are told. To compute fewer again costs less than to wait."""
MAX_BEGINNINGS = 16384
"""Longer beginnings whose last replica a router remembers."""


class Router(Protocol):
    """Chooses among replicas that are numbered from 0. Deterministic."""

    needs_reports: bool
    """Whether the choice depends on the reports at all."""

    def choose(self, beginnings: Sequence[str]) -> int:
        """The replica for a request; it counts as sent there. beginnings: names that are the same for requests that
        begin alike, the shortest beginning first; empty for one that shares none."""
        ...

    def learn(self, num_live: Sequence[int | None]) -> None:
        """Every replica reports how many requests it has that have not ended; None: it takes none now."""
        ...


class RoundRobin:
    """One after the other."""

    needs_reports = False

    def __init__(self, num_replicas: int) -> None:
        self._takers = list(range(num_replicas))
        self._last = -1

    def choose(self, beginnings: Sequence[str]) -> int:
        self._last = next((each for each in self._takers if each > self._last), self._takers[0])
        return self._last

    def learn(self, num_live: Sequence[int | None]) -> None:
        self._takers = [number for number, live in enumerate(num_live) if live is not None]


class LeastLoaded:
    """The replica with the fewest requests; of equal ones the one after the last choice."""

    needs_reports = True

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self.loads = dict.fromkeys(range(num_replicas), 0)
        """Requests of the replicas that take more."""
        self._next = 0

    def choose(self, beginnings: Sequence[str]) -> int:
        order = (*range(self._next, self._num_replicas), *range(self._next))
        chosen = min((each for each in order if each in self.loads), key=self.loads.__getitem__)
        self._next = (chosen + 1) % self._num_replicas
        return self.send(chosen)

    def send(self, replica: int) -> int:
        """Count a request that is sent to `replica`; returns `replica`."""
        self.loads[replica] += 1
        return replica

    def learn(self, num_live: Sequence[int | None]) -> None:
        self.loads = {number: live for number, live in enumerate(num_live) if live is not None}


class PrefixAware:
    """Requests that begin alike go to the same replica, whose cache then holds that prefix, unless it has far more than
    its share of the requests. The longest beginning that a replica was sent before counts most: that replica has the
    conversation. For the shortest one each has its own order of all replicas (rendezvous hashing), so that a popular
    prefix spreads over as few of them as it needs. Requests that share nothing go to the least loaded."""

    needs_reports = True

    def __init__(self, num_replicas: int) -> None:
        self._least_loaded = LeastLoaded(num_replicas)
        self._sent: dict[str, int] = {}
        """The longer beginnings, the latest last, and their replicas."""

    def choose(self, beginnings: Sequence[str]) -> int:
        if not beginnings:
            return self._least_loaded.choose(())
        shortest, *longer = beginnings
        loads = self._least_loaded.loads
        limit = SLACK * sum(loads.values()) / len(loads) + SLACK_REQUESTS
        known = [self._sent[each] for each in reversed(longer) if each in self._sent]
        order = sorted(loads, key=lambda replica: _weight(shortest, replica))
        candidates = [replica for replica in (*known, *order) if loads.get(replica, limit + 1) <= limit]
        chosen = candidates[0] if candidates else order[0]
        for each in longer:
            self._sent.pop(each, None)
            self._sent[each] = chosen
        while len(self._sent) > MAX_BEGINNINGS:
            del self._sent[next(iter(self._sent))]
        return self._least_loaded.send(chosen)

    def learn(self, num_live: Sequence[int | None]) -> None:
        self._least_loaded.learn(num_live)


def _weight(prefix: str, replica: int) -> bytes:
    return hashlib.blake2b(f"{replica} {prefix}".encode(), digest_size=8).digest()


ROUTERS: Mapping[str, type[RoundRobin] | type[LeastLoaded] | type[PrefixAware]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
}


def make_router(name: str, num_replicas: int) -> Router:
    """Raises UserError for a name that is not in ROUTERS."""
    if name not in ROUTERS:
        raise UserError(
            f"unknown router {name!r}{nearest_name(name, ROUTERS)} (known: {', '.join(ROUTERS)})", param="router"
        )
    return ROUTERS[name](num_replicas)


def beginnings_of(request: EngineRequest) -> list[str]:
    """Names of a request's first PREFIX_TOKENS tokens, twice as many, four times as many, up to its length."""
    names = []
    token_ids, start, end = request.prompt_token_ids, 0, PREFIX_TOKENS
    digest = hashlib.blake2b(request.cache_salt.encode(), digest_size=16)
    while end <= len(token_ids):
        digest.update(msgspec.msgpack.encode(token_ids[start:end]))
        names.append(digest.hexdigest())
        start, end = end, 2 * end
    return names
