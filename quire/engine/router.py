"""Routers choose a replica per request from the replicas' reports and their own choices since. The fleet reports before
each request, the simulator at fixed intervals."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from quire.errors import UserError, nearest_name
from quire.request import EngineRequest

SLACK = 1.25
"""Factor of the mean load up to which a replica takes requests of prefixes that it has."""
SLACK_REQUESTS = 4
"""Requests added to that bound."""
PREFIX_TOKENS = 256
"""Number of first tokens that identify a shared prefix."""
MAX_BEGINNINGS = 16384
"""Maximum longer beginnings that a router remembers."""


class Router(Protocol):
    """Rule by which a fleet or simulator chooses a replica for each request, numbered from 0; equal histories give
    equal choices."""

    needs_reports: bool
    """True if the choice depends on the reports."""

    def choose(self, beginnings: Sequence[str]) -> int:
        """Choose and count the replica for a request. beginnings: names of its prefixes, shortest first, equal for
        equal prefixes; empty if it shares none."""
        ...

    def learn(self, num_live: Sequence[int | None]) -> None:
        """Report the live requests of each replica; None: it takes none now."""
        ...


class RoundRobin:
    """Replicas in turn."""

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
    """Router to the replica with the fewest requests; ties go to the next after the last choice."""

    needs_reports = True

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self.loads = dict.fromkeys(range(num_replicas), 0)
        """Number of live requests of each replica that accepts more."""
        self._next = 0

    def choose(self, beginnings: Sequence[str]) -> int:
        order = (*range(self._next, self._num_replicas), *range(self._next))
        chosen = min((each for each in order if each in self.loads), key=self.loads.__getitem__)
        self._next = (chosen + 1) % self._num_replicas
        return self.send(chosen)

    def send(self, replica: int) -> int:
        self.loads[replica] += 1
        return replica

    def learn(self, num_live: Sequence[int | None]) -> None:
        self.loads = {number: live for number, live in enumerate(num_live) if live is not None}


class PrefixAware:
    """Sends requests with a common prefix to the replica that has it cached, unless it exceeds its share. A popular
    prefix spreads over as few replicas as it needs."""

    needs_reports = True

    def __init__(self, num_replicas: int) -> None:
        self._least_loaded = LeastLoaded(num_replicas)
        self._sent: dict[str, int] = {}
        """Replica that was last sent each longer prompt beginning, oldest first."""

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
    """Router by its name in ROUTERS. Raises UserError for another name."""
    if name not in ROUTERS:
        raise UserError(
            f"unknown router {name!r}{nearest_name(name, ROUTERS)} (known: {', '.join(ROUTERS)})", param="router"
        )
    return ROUTERS[name](num_replicas)


def beginnings_of(request: EngineRequest) -> list[str]:
    """Names of a request's first PREFIX_TOKENS tokens, its first 2 * PREFIX_TOKENS, 4 * PREFIX_TOKENS, and so on."""
    names = []
    token_ids, start, end = request.prompt_token_ids, 0, PREFIX_TOKENS
    digest = hashlib.blake2b(request.cache_salt.encode(), digest_size=16)
    while end <= len(token_ids):
        digest.update(msgspec.msgpack.encode(token_ids[start:end]))
        names.append(digest.hexdigest())
        start, end = end, 2 * end
    return names
