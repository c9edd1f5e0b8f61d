"""Gates: the reasons why a waiting request may not start yet. A gate lets a request pass or defers it
(`Request.deferral`). The scheduler asks the gates of `default_gates` in order, in three stages (`GateStage`). A
deferred request keeps its place: later ones may start before it, but leave it its blocks and tokens of the step
(`Reservations`), and its slots unless it waits for something outside the engine (`reserves_slots=False`). Running
requests are not preempted for it, and no later request starts while a preempted one is deferred. An abort, a time
limit, a start and the deferral's deadline end it."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from quire.decoding.sequence import PENDING_PREFIX, Deferral, Request, RequestStatus
from quire.kv_cache.connectors.interface import Lookup
from quire.kv_cache.manager import KVCacheManager
from quire.scheduler.admission import Quote
from quire.scheduler.matching import first_matchers

MIN_SHARED_BLOCKS = 2
"""Fewest blocks worth a wait."""

LOAD_SECONDS = 10.0
"""Longest wait for an asynchronous load in seconds. A slower one counts as failed."""
MAX_LOADS = 3


class GateStage(enum.IntEnum):
    """Points of a request's admission (before its quote, with it, at the start) at which gates are asked."""

    LOOK_UP = 0
    """Whenever a request is considered, also before preemptions for it: the check changes nothing."""
    BEGIN = 1
    """At the request's turn, or before preemptions for it: the check may begin work, such as a load."""
    START = 2
    """The quote's blocks are free: the check may allocate some of them."""


class Gate(Protocol):
    """One reason why a waiting request may not start yet (its grammar, adapter, images, stored blocks); Admitter asks
    all gates."""

    reason: str
    stage: GateStage

    def check(self, request: Request, quote: Quote, now: float) -> Deferral | None:
        """Deferral of the request; None: it passes. A request is asked again when its deferral has ended."""
        ...

    def forget(self, request: Request) -> None:
        """Drop what the gate keeps of a request that starts or has ended; not called at a preemption."""
        ...


class Gates:
    def __init__(self, gates: Sequence[Gate]) -> None:
        self._gates = gates
        self.num_deferrals: Counter[str] = Counter()
        """Reason -> deferrals so far."""

    def check(self, stages: tuple[GateStage, ...], request: Request, quote: Quote, now: float) -> Deferral | None:
        """Deferral by the first gate of these stages that does not let the request pass; None: all do."""
        for gate in self._gates:
            if gate.stage in stages and (deferral := gate.check(request, quote, now)) is not None:
                return deferral
        return None

    def defer(self, stages: tuple[GateStage, ...], request: Request, quote: Quote, now: float) -> bool:
        """`check`, which also stores the deferral in the request. True: there is one."""
        request.deferral = self.check(stages, request, quote, now)
        if request.deferral is not None:
            self.num_deferrals[request.deferral.reason] += 1
        return request.deferral is not None

    def forget(self, request: Request) -> None:
        """End the deferral of a request that starts or has ended, and drop it from the gates."""
        request.stop_waiting()
        for gate in self._gates:
            gate.forget(request)


def is_deferred(request: Request, now: float) -> bool:
    """True while a request's deferral lasts; clears one that is over."""
    deferral = request.deferral
    if deferral is None:
        return False
    if deferral.is_pending() and now < deferral.deadline:
        return True
    request.stop_waiting()
    return False


class Reservations:
    """Request slots and blocks of the requests deferred in one pass of `Scheduler.schedule`. Later requests may not
    take them."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_slots = 0
        self.num_blocks = 0
        self.has_preempted = False
        """True if one was preempted, unless in the background and waiting for something outside the engine: no later
        request starts."""

    def __bool__(self) -> bool:
        return self.num_requests > 0

    def reserve(self, request: Request) -> None:
        assert request.deferral is not None
        if request.status is RequestStatus.PREEMPTED:
            # One in the background may wait for as long as live requests want its adapter.
            self.has_preempted |= request.deferral.reserves_slots or not request.is_background
        self.num_requests += 1
        self.num_slots += len(request.live_sequences) if request.deferral.reserves_slots else 0
        self.num_blocks += request.deferral.reserved_blocks


class ConstraintGate:
    """Defers a request until its matchers have answered: at its start its constraint is compiled, after a preemption
    its last token is followed; nothing is reserved."""

    reason = "compiling constraint"
    stage = GateStage.LOOK_UP

    def check(self, request: Request, quote: Quote, now: float) -> Deferral | None:
        if request.constraint is None or _has_matchers(request):
            return None
        return Deferral(self.reason, 0, lambda: not _has_matchers(request), reserves_slots=False)

    def forget(self, request: Request) -> None:
        """Do nothing: no state is kept."""


def _has_matchers(request: Request) -> bool:
    is_followed = not any(sequence.awaits_matcher for sequence in request.live_sequences)
    return is_followed and all(each.is_ready and each.error is None for each in first_matchers(request))


class PendingPrefixGate:
    """Defers all but one of the requests that arrive together with a new prefix (docs/decisions/0004-scheduling.md).
    The request waits until one live sequence (the leader) has committed a number of blocks; if it ends first, the first
    deferred request computes the rest. A deferral never leaves a step empty."""

    reason = PENDING_PREFIX
    stage = GateStage.LOOK_UP

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv

    def check(self, request: Request, quote: Quote, now: float) -> Deferral | None:
        kv, num_cached = self._kv, quote.num_cached_tokens
        if quote.is_resumed:
            return None
        found = kv.find_pending(request.live_sequences[0].chain, num_cached, quote.max_cached_tokens)
        if found is None or found[1] - num_cached // kv.hash_block_size < MIN_SHARED_BLOCKS:
            return None
        if found[0].is_background and not request.is_background:
            return None  # the leader may have to leave its share of the steps to others
        return Deferral(self.reason, quote.num_blocks, lambda: kv.is_pending_in(*found))

    def forget(self, request: Request) -> None:
        """Do nothing: no state is kept."""


class AsynchronousLoadGate:
    """Lets the KV connector load the next blocks of a request's prefix where that takes longer than a plan and pays.

    A request waits once for such a load, at most LOAD_SECONDS, and computes the blocks that failed to load.
    """

    reason = "asynchronous load"
    stage = GateStage.BEGIN

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._tried: set[str] = set()
        """Waiting requests that have found something to load: each tries once."""

    def check(self, request: Request, quote: Quote, now: float) -> Deferral | None:
        if quote.is_resumed or request.request_id in self._tried:
            return None
        kv, chain = self._kv, request.live_sequences[0].chain
        found = kv.connector.lookup(chain, quote.num_cached_tokens, quote.max_cached_tokens, asynchronous=True)
        if found is None or not found.is_asynchronous:
            return None
        self._tried.add(request.request_id)
        # Blocks that are only staged need no device blocks yet.
        num_taken = max(quote.num_blocks, kv.transfer_blocks.num_taken(found)) if found.to_load else 0
        if not found.is_worthwhile or num_taken > quote.room:
            return None
        # The loaded blocks are then the most recently used ones, and the next quote finds them.
        return _begin_load(self.reason, kv, found, quote, now)._replace(reserves_slots=False)

    def forget(self, request: Request) -> None:
        self._tried.discard(request.request_id)


class NextPlanLoadGate:
    """Orders the copies of a request's next blocks into this plan; the request waits for it.

    In the next pass it starts with a plain prefix hit. After MAX_LOADS attempts it computes the prefix.
    """

    reason = "load for the next plan"
    stage = GateStage.START

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._num_loads: Counter[str] = Counter()
        """Request id -> number of loads for the waiting request."""

    def check(self, request: Request, quote: Quote, now: float) -> Deferral | None:
        if quote.is_resumed or self._num_loads.get(request.request_id, 0) >= MAX_LOADS:
            return None
        kv, chain = self._kv, request.live_sequences[0].chain
        found = kv.connector.lookup(chain, quote.num_cached_tokens, quote.max_cached_tokens, asynchronous=False)
        # With sliding windows a longer hit shares fewer blocks than the one on the device, and may not fit.
        if found is None or kv.transfer_blocks.num_taken(found) > quote.room:
            return None
        self._num_loads[request.request_id] += 1
        return _begin_load(self.reason, kv, found, quote, now)

    def forget(self, request: Request) -> None:
        self._num_loads.pop(request.request_id, None)


def _begin_load(reason: str, kv: KVCacheManager, found: Lookup, quote: Quote, now: float) -> Deferral:
    """Begin to load found blocks into newly allocated ones, which count as part of the request's needs."""
    num_before = kv.pool.num_allocatable
    load = kv.connector.allocated(found, kv.transfer_blocks.allocate(found))
    num_reserved = max(0, quote.num_blocks - (num_before - kv.pool.num_allocatable))
    return Deferral(reason, num_reserved, lambda: load.is_pending, now + LOAD_SECONDS, load.release)


def default_gates(kv: KVCacheManager) -> list[Gate]:
    return [
        ConstraintGate(),
        PendingPrefixGate(kv),
        AsynchronousLoadGate(kv),
        NextPlanLoadGate(kv),
    ]
