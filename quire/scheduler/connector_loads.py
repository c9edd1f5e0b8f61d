"""Deferral of waiting requests whose cached prefix the KV connector loads.

The scheduler defers such a request while its blocks are loaded, like one whose prefix a running sequence computes
(quire/scheduler/deferred.py): the request keeps its place in the queue, and request slots and blocks are reserved for
it.

- A request waits once for an asynchronous load, until it ends and at most LOAD_SECONDS. Every load ends in success or
  failure; the request computes the blocks that failed to load.
- A request waits for one plan that copies blocks to the device. In the next pass it starts with a plain prefix hit; if
  it cannot start then, its blocks stay cached without an owner. After MAX_LOADS attempts it computes the prefix.
- Running requests are not preempted for it until its blocks are loaded (quire/scheduler/priority_preemption.py).
- No running request waits for it: the scheduler releases the blocks held for it before it preempts a running request.
- When there is nothing else to compute, a plan carries the transfers alone, and its result waits for them for a limited
  time, so that the engine does not spin.
"""

from __future__ import annotations

from quire.decoding.parallel import num_shared_tokens
from quire.kv_cache.connectors.interface import Lookup
from quire.kv_cache.manager import KVCacheManager
from quire.request import LoadDeferral, Request
from quire.scheduler.admission import blocks_to_start
from quire.scheduler.deferred import DeferredRequests
from quire.scheduler.preemption import swapped_blocks
from quire.transfers import HostTransfers, Transfers

LOAD_SECONDS = 10.0
"""Longest wait for an asynchronous load. One that takes longer counts as failed; its blocks are freed when it ends."""
MAX_LOADS = 3


class ConnectorLoads:
    """The requests that wait for the KV connector in one pass of `Scheduler.schedule`; `deferred` holds their
    reservations."""

    def __init__(self, kv: KVCacheManager, deferred: DeferredRequests, now: float) -> None:
        self._kv = kv
        self._deferred = deferred
        self._now = now

    def keeps_waiting(self, request: Request) -> bool:
        """Whether a deferred request keeps waiting for its loads; if so, reserve for it."""
        if not self.waits_on(request) or request.load_deferral is None:
            return False
        self._deferred.reserve(request, request.load_deferral.reserved_blocks)
        return True

    def waits_on(self, request: Request) -> bool:
        """As `keeps_waiting`, without a reservation. Clears a wait that is over."""
        wait = request.load_deferral
        if wait is None:
            return False
        if wait.load.is_pending and self._now < wait.deadline:
            return True
        # The loaded blocks are now the most recently used ones; the caller looks them up next.
        stop_waiting(request)
        return False

    def load_before_preemption(self, request: Request, max_chunk: int) -> bool:
        """Load asynchronously before running requests are preempted for `request`; returns whether it has to wait.
        Until it can start, the running requests go on."""
        if swapped_blocks(request):
            return False
        leader, max_tokens = request.live_sequences[0], num_shared_tokens(request) - 1
        num_cached = self._kv.match_prefix(leader.chain, leader.token_ids, max_tokens)
        num_blocks = blocks_to_start(request, self._kv, num_cached, max_chunk)
        return self.load_asynchronously(request, num_cached, max_tokens, num_blocks)

    def load_asynchronously(self, request: Request, num_cached_tokens: int, max_tokens: int, num_blocks: int) -> bool:
        """Load the next blocks of a request if that takes more than a plan, and pays; returns whether the request has
        to wait.

        num_cached_tokens: its prefix hit, looked up with `max_tokens`. num_blocks: what it would need to start now.
        """
        if request.was_loaded:
            return False
        chain = request.live_sequences[0].chain
        found = self._kv.connector.lookup(chain, num_cached_tokens, max_tokens, asynchronous=True)
        if found is None or not found.is_asynchronous:
            return False
        request.was_loaded = True  # the request tries this once
        # Blocks that are only staged need no room on the device yet.
        if not found.is_worthwhile or (found.to_load and not self._has_room(found, num_blocks)):
            return False
        self._begin(request, found, num_blocks)
        return True

    def load_for_next_plan(self, request: Request, num_cached_tokens: int, max_tokens: int, num_blocks: int) -> bool:
        """Order the copies of a request's next blocks into this plan; returns whether the request has to wait for
        them."""
        if request.num_prefix_loads >= MAX_LOADS:
            return False
        chain = request.live_sequences[0].chain
        found = self._kv.connector.lookup(chain, num_cached_tokens, max_tokens, asynchronous=False)
        if found is None or not self._has_room(found, 0):
            return False
        request.num_prefix_loads += 1
        self._begin(request, found, num_blocks)
        return True

    def _has_room(self, found: Lookup, num_blocks: int) -> bool:
        """Whether `num_blocks`, and the blocks of a load, fit. With sliding windows a longer hit shares fewer blocks
        than the one on the device, and may not fit."""
        room = self._kv.pool.num_allocatable - self._deferred.num_blocks
        return max(num_blocks, self._kv.transfer_blocks.num_taken(found)) <= room

    def _begin(self, request: Request, found: Lookup, num_blocks: int) -> None:
        kv, num_before = self._kv, self._kv.pool.num_allocatable
        load = kv.connector.allocated(found, kv.transfer_blocks.allocate(found))
        num_allocated = num_before - kv.pool.num_allocatable
        request.load_deferral = LoadDeferral(load, self._now + LOAD_SECONDS, max(0, num_blocks - num_allocated))
        self._deferred.reserve(request, request.load_deferral.reserved_blocks)


def stop_waiting(request: Request) -> None:
    """End a request's wait for loads; blocks that are not loaded are computed, if the request still lives."""
    wait, request.load_deferral = request.load_deferral, None
    if wait is not None:
        wait.load.release()


def must_wait(kv: KVCacheManager) -> bool:
    """Whether a request, or the KV connector's next order, waits for the end of a transfer."""
    return kv.connector.must_wait or kv.transfer_blocks.is_transferring


def order_transfers(
    kv: KVCacheManager, swap_in: list[tuple[int, int]], *, may_wait: bool, awaits_report: bool
) -> Transfers | None:
    """The KV connector's part of the plan at hand, once per plan. swap_in: blocks of preempted sequences that return
    with it. may_wait: the plan has nothing else, and none is in flight. awaits_report: it is to wait in any case."""
    kv.transfer_blocks.release()
    transfers = kv.connector.orders(may_allocate=not swap_in)
    if may_wait and not (transfers is not None and transfers.swap_in):
        awaits_report |= must_wait(kv)
    if awaits_report:
        transfers = transfers or HostTransfers()
        transfers.awaits_report = True
    return transfers
