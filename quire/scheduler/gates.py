"""Gates: the reasons for which a waiting request may not start yet.

A gate looks at a request whose turn it is and lets it pass, or defers it (`Request.deferral`). The scheduler asks the
gates of `default_gates` in order, in three stages (`Stage`). Another reason to wait is another class and one line in
that list.

A deferred request keeps its place in the queue, and every pass looks at it again. Later requests may start before it,
but take nothing from it (`Reservations`): blocks for the whole deferred request are reserved, and a later prompt must
fit into the rest of the step's budget, after which it takes one token a step. Request slots are reserved too, unless
the event is outside the engine; then the deferred request gets the next free slots after the event. While a preempted
request is deferred, no later request starts. Running requests are not preempted for a deferred one. An abort, a time
limit and a start end the deferral; so does its deadline.
"""

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
"""A wait for fewer blocks does not pay: a step reads all weights, which costs about as much as a block of tokens."""

LOAD_SECONDS = 10.0
"""Longest wait for an asynchronous load. One that takes longer counts as failed; its blocks are freed when it ends."""
MAX_LOADS = 3


class Stage(enum.IntEnum):
    """When the scheduler asks a gate."""

    LOOK_UP = 0
    """Whenever it considers a request, also before it plans to preempt others for it: the check changes nothing."""
    BEGIN = 1
    """When it is the request's turn, or others would be preempted for it: the check may begin work, such as a load."""
    START = 2
    """When the blocks that the quote names are free: the check may allocate some of them."""


class Gate(Protocol):
    """One reason to wait. What a gate looks at besides a request and its quote it is made with (`default_gates`)."""

    reason: str
    stage: Stage

    def check(self, request: Request, quote: Quote, now: float) -> Deferral | None:
        """Defer the request, or return None when this gate lets it pass. What was deferred is asked again when its
        deferral has ended."""
        ...

    def forget(self, request: Request) -> None:
        """Drop what the gate keeps of a request that starts, or has ended: called at both, and not at a preemption."""
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
        self.num_requests = 0
        self.num_slots = 0
        self.num_blocks = 0
        self.has_preempted = False
        """Whether one of the requests ran before: then no later request starts."""

    def __bool__(self) -> bool:
        return self.num_requests > 0

    def reserve(self, request: Request) -> None:
        """Reserve for a deferred request."""
        assert request.deferral is not None
        self.has_preempted |= request.status is RequestStatus.PREEMPTED
        self.num_requests += 1
        self.num_slots += len(request.live_sequences) if request.deferral.reserves_slots else 0
        self.num_blocks += request.deferral.reserved_blocks


class ConstraintGate:
    """A request waits until its matchers have answered: at its start its constraint is compiled, after a preemption its
    last token is followed. That runs beside the engine. Nothing is reserved for the request: the scheduler starts
    others meanwhile."""

    reason = "compiling constraint"
    stage = Stage.LOOK_UP

    def check(self, request: Request, quote: Quote, now: float) -> Deferral | None:
        if request.constraint is None or _has_matchers(request):
            return None
        return Deferral(self.reason, 0, lambda: not _has_matchers(request), reserves_slots=False)

    def forget(self, request: Request) -> None:
        """Nothing is kept."""


def _has_matchers(request: Request) -> bool:
    """A constrained request can start. One that is refused waits until the core has told so."""
    is_followed = not any(sequence.awaits_matcher for sequence in request.live_sequences)
    return is_followed and all(each.is_ready and each.error is None for each in first_matchers(request))


class PendingPrefixGate:
    """Of requests that arrive together with the same new prefix, one computes it and the others wait
    (docs/decisions/0004-scheduling.md).

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


class AsynchronousLoadGate:
    """Has the KV connector load the next blocks of a request's prefix, where that takes more than a plan and pays.

    A request waits once for such a load, until it ends and at most LOAD_SECONDS. Every load ends in success or failure;
    the request computes the blocks that failed to load. When there is nothing else to compute, a plan carries the
    transfers alone, and its result waits for them for a limited time, so that the engine does not spin.
    """

    reason = "asynchronous load"
    stage = Stage.BEGIN

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._tried: set[str] = set()
        """Ids of the waiting requests that have found something to load: a request tries once."""

    def check(self, request: Request, quote: Quote, now: float) -> Deferral | None:
        if quote.is_resumed or request.request_id in self._tried:
            return None
        kv, chain = self._kv, request.live_sequences[0].chain
        found = kv.connector.lookup(chain, quote.num_cached_tokens, quote.max_cached_tokens, asynchronous=True)
        if found is None or not found.is_asynchronous:
            return None
        self._tried.add(request.request_id)
        # Blocks that are only staged need no room on the device yet.
        num_taken = max(quote.num_blocks, kv.transfer_blocks.num_taken(found)) if found.to_load else 0
        if not found.is_worthwhile or num_taken > quote.room:
            return None
        # Behind its end the loaded blocks are the most recently used ones; the next quote finds them.
        return _begin_load(self.reason, kv, found, quote, now)._replace(reserves_slots=False)

    def forget(self, request: Request) -> None:
        self._tried.discard(request.request_id)


class NextPlanLoadGate:
    """Orders the copies of a request's next blocks into this plan; the request waits for that plan.

    In the next pass it starts with a plain prefix hit; if it cannot start then, its blocks stay cached without an
    owner. After MAX_LOADS attempts it computes the prefix. No running request waits for it: the scheduler releases the
    blocks held for it before it preempts a running request.
    """

    reason = "load for the next plan"
    stage = Stage.START

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._num_loads: Counter[str] = Counter()
        """Request id -> times that blocks were loaded for a waiting request."""

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
    """Load what a lookup has found, into blocks that are taken off what the request needs."""
    num_before = kv.pool.num_allocatable
    load = kv.connector.allocated(found, kv.transfer_blocks.allocate(found))
    num_reserved = max(0, quote.num_blocks - (num_before - kv.pool.num_allocatable))
    return Deferral(reason, num_reserved, lambda: load.is_pending, now + LOAD_SECONDS, load.release)


def default_gates(kv: KVCacheManager) -> list[Gate]:
    """The product's own gates, in the order in which they are asked."""
    return [
        ConstraintGate(),
        PendingPrefixGate(kv),
        AsynchronousLoadGate(kv),
        NextPlanLoadGate(kv),
    ]
