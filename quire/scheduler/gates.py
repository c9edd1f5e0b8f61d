"""Gates: the reasons for which a waiting request may not start yet.

A gate looks at a request whose turn it is and lets it pass, or defers it (`Request.deferral`). The scheduler asks the
gates of `default_gates` in order, in three stages (`Stage`). Another reason to wait is another class and one line in
that list.

A deferred request keeps its place in the queue, and every pass looks at it again. Later requests may start before it,
but take nothing from it (`Reservations`): request slots and blocks for the whole deferred request are reserved, and a
later prompt must fit into the rest of the step's budget, after which it takes one token a step. While a preempted
request is deferred, no later request starts. Running requests are not preempted for a deferred one. An abort, a time
limit and a start end the deferral; so does its deadline.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from quire.kv_cache.manager import KVCacheManager
from quire.request import PENDING_PREFIX, Deferral, Request, RequestStatus
from quire.scheduler.admission import Quote

MIN_SHARED_BLOCKS = 2
"""A wait for fewer blocks does not pay: a step reads all weights, which costs about as much as a block of tokens."""

FETCH_SECONDS = 10.0
"""Longest wait for loads to the host; a store that takes longer counts as failed."""
MAX_SWAP_INS = 3


class Stage(enum.IntEnum):
    """When the scheduler asks a gate."""

    LOOK_UP = 0
    """Whenever it considers a request, also before it plans to preempt others for it: the check changes nothing."""
    BEGIN = 1
    """When it is the request's turn, or others would be preempted for it: the check may begin work, such as a load."""
    START = 2
    """When the blocks that the quote names are free: the check may allocate some of them."""


class Gate(Protocol):
    """One reason to wait."""

    reason: str
    stage: Stage

    def check(self, request: Request, quote: Quote, now: float) -> Deferral | None:
        """Defer the request, or return None when this gate lets it pass. What was deferred is asked again when its
        deferral has ended."""
        ...

    def forget(self, request: Request) -> None:
        """Drop what the gate keeps of a request that starts, or has ended."""
        ...


class Gates:
    """The gates of one scheduler, in order."""

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._gates = gates
        self.num_deferrals: Counter[str] = Counter()
        """Deferrals so far, by reason."""

    def check(self, stages: tuple[Stage, ...], request: Request, quote: Quote, now: float) -> Deferral | None:
        """The deferral of the first gate of these stages that does not let the request pass."""
        for gate in self._gates:
            if gate.stage in stages and (deferral := gate.check(request, quote, now)) is not None:
                return deferral
        return None

    def defer(self, stages: tuple[Stage, ...], request: Request, quote: Quote, now: float) -> bool:
        """As `check`; keeps the deferral with the request. Returns whether there is one."""
        request.deferral = self.check(stages, request, quote, now)
        if request.deferral is not None:
            self.num_deferrals[request.deferral.reason] += 1
        return request.deferral is not None

    def forget(self, request: Request) -> None:
        """End the deferral of a request that starts, or has ended, and drop what the gates keep of it."""
        request.stop_waiting()
        for gate in self._gates:
            gate.forget(request)


def is_deferred(request: Request, now: float) -> bool:
    """Whether a request's deferral goes on. Ends one that is over."""
    deferral = request.deferral
    if deferral is None:
        return False
    if deferral.is_pending() and now < deferral.deadline:
        return True
    request.stop_waiting()
    return False


class Reservations:
    """Request slots and blocks of the requests that are deferred in one pass of `Scheduler.schedule`."""

    def __init__(self) -> None:
        self.num_slots = 0
        self.num_blocks = 0
        self.has_preempted = False
        """Whether one of the requests ran before: then no later request starts."""

    def __bool__(self) -> bool:
        return self.num_slots > 0

    def reserve(self, request: Request) -> None:
        """Reserve for a deferred request."""
        assert request.deferral is not None
        self.has_preempted |= request.status is RequestStatus.PREEMPTED
        self.num_slots += len(request.live_sequences)
        self.num_blocks += request.deferral.reserved_blocks


class PendingPrefixGate:
    """Of requests that arrive together with the same new prefix, one computes it and the others wait
    (docs/decisions/0005-sharing-in-flight.md).

    - The request waits for one live sequence (the leader) to commit a given number of blocks. Running sequences get
      tokens in every step, so the leader advances; when the leader is aborted or preempted, the wait is over, and the
      first deferred request computes the rest itself.
    - A deferral never leaves a step empty: the leader is in this step's plan, or in one in flight.
    - The request may be deferred once more, if by then a sequence computes further shared blocks; each deferral leaves
      fewer blocks to wait for.
    """

    reason = PENDING_PREFIX
    stage = Stage.LOOK_UP

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv

    def check(self, request: Request, quote: Quote, now: float) -> Deferral | None:
        kv, num_cached = self._kv, quote.num_cached_tokens
        if quote.is_resumed:
            return None
        found = kv.find_pending(request.live_sequences[0].chain, num_cached, quote.max_cached_tokens)
        if found is None or found[1] - num_cached // kv.block_size < MIN_SHARED_BLOCKS:
            return None
        return Deferral(self.reason, quote.num_blocks, lambda: kv.is_pending_in(*found))

    def forget(self, request: Request) -> None:
        """Nothing is kept."""


class HostLoadGate:
    """Has the KV connector load the next blocks of a request's prefix to the host, if that pays.

    A request waits once for such loads, until they end and at most FETCH_SECONDS. Every load ends in success or
    failure; the request computes the blocks that failed to load. When there is nothing else to compute, a plan carries
    the transfers alone, and its result waits for them for a limited time, so that the engine does not spin.
    """

    reason = "load to the host"
    stage = Stage.BEGIN

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._tried: set[str] = set()
        """Ids of the waiting requests that have found something to load: a request tries once."""

    def check(self, request: Request, quote: Quote, now: float) -> Deferral | None:
        if quote.is_resumed or request.request_id in self._tried:
            return None
        loader, connector = self._kv.loader, self._kv.connector
        chain, num_cached = request.live_sequences[0].chain, quote.num_cached_tokens
        reach = loader.reach(chain, num_cached, quote.max_cached_tokens, fetch=True)
        if reach is None or not reach.on_disk:
            return None
        self._tried.add(request.request_id)
        num_tokens = reach.num_blocks * self._kv.block_size - num_cached
        if not connector.is_fetch_worthwhile(len(reach.on_disk), num_tokens):
            return None
        fetch = connector.fetch([*reach.on_host, *reach.on_disk])
        # Behind its end the fetched blocks are the most recently used ones of the host pool; the next quote finds them.
        return Deferral(
            self.reason,
            quote.num_blocks,
            is_pending=lambda: fetch.is_pending,
            deadline=now + FETCH_SECONDS,
            cancel=lambda: connector.drop(fetch),
        )

    def forget(self, request: Request) -> None:
        self._tried.discard(request.request_id)


class HostCopyGate:
    """Orders host blocks of a request's prefix into this plan; the request waits for that plan.

    In the next pass it starts with a plain prefix hit; if it cannot start then, its blocks stay cached without an
    owner. After MAX_SWAP_INS attempts it computes the prefix. No running request waits for it: the scheduler releases
    the blocks held for it before it preempts a running request.
    """

    reason = "copy from the host"
    stage = Stage.START

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._num_copies: Counter[str] = Counter()
        """Request id -> times that blocks were copied for a waiting request."""

    def check(self, request: Request, quote: Quote, now: float) -> Deferral | None:
        if quote.is_resumed or self._num_copies.get(request.request_id, 0) >= MAX_SWAP_INS:
            return None
        chain, loader = request.live_sequences[0].chain, self._kv.loader
        reach = loader.reach(chain, quote.num_cached_tokens, quote.max_cached_tokens, fetch=False)
        # With sliding windows a longer hit shares fewer blocks than the one on the device, and may not fit.
        if reach is None or loader.blocks_to_bring(reach) > quote.room:
            return None
        self._num_copies[request.request_id] += 1
        num_allocated = loader.bring(reach)
        return Deferral(self.reason, max(0, quote.num_blocks - num_allocated), is_pending=lambda: False)

    def forget(self, request: Request) -> None:
        self._num_copies.pop(request.request_id, None)


def default_gates(kv: KVCacheManager) -> list[Gate]:
    """The product's own gates, in the order in which they are asked."""
    return [
        PendingPrefixGate(kv),
        HostLoadGate(kv),
        HostCopyGate(kv),
    ]
