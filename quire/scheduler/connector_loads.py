"""Deferral of waiting requests whose cached prefix the KV connector loads: from host memory, or from disk.

The scheduler defers such a request while its blocks are loaded, like one whose prefix a running sequence computes
(quire/scheduler/deferred.py): the request keeps its place in the queue, and request slots and blocks are reserved for
it.

- A request waits once for loads from disk, until they end and at most FETCH_SECONDS. Every load ends in success or
  failure; the request computes the blocks that failed to load.
- A request waits for one plan that copies blocks from the host. In the next pass it starts with a plain prefix hit; if
  it cannot start then, its blocks stay cached without an owner. After MAX_SWAP_INS attempts it computes the prefix.
- Running requests are not preempted for it until its blocks are loaded (quire/scheduler/priority_preemption.py).
- No running request waits for it: the scheduler releases the blocks held for it before it preempts a running request.
- When there is nothing else to compute, a plan carries the transfers alone, and its result waits for them for a limited
  time, so that the engine does not spin.
"""

from __future__ import annotations

from quire.decoding.parallel import num_shared_tokens
from quire.kv_cache.manager import KVCacheManager
from quire.request import LoadDeferral, Request
from quire.scheduler.admission import blocks_to_start
from quire.scheduler.deferred import DeferredRequests
from quire.scheduler.preemption import swapped_blocks

FETCH_SECONDS = 10.0
"""Longest wait for loads from disk; a disk that takes longer counts as failed."""
MAX_SWAP_INS = 3


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
        if wait.fetch is not None and wait.fetch.is_pending and self._now < wait.deadline:
            return True
        # The fetched blocks are now the most recently used ones of the host pool; the caller looks them up next.
        stop_waiting(request, self._kv)
        return False

    def fetch_before_start(self, request: Request, max_chunk: int) -> bool:
        """Fetch blocks from disk before running requests are preempted for `request`; returns whether it has to wait.
        Until it can start, the running requests go on."""
        if swapped_blocks(request):
            return False
        leader, max_tokens = request.live_sequences[0], num_shared_tokens(request) - 1
        num_cached = self._kv.match_prefix(leader.chain, leader.token_ids, max_tokens)
        num_blocks = blocks_to_start(request, self._kv, num_cached, max_chunk)
        return self.fetch(request, num_cached, max_tokens, num_blocks)

    def fetch(self, request: Request, num_cached_tokens: int, max_tokens: int, num_blocks: int) -> bool:
        """Start loading the next blocks of a request from disk, if that pays; returns whether the request has to wait.

        num_cached_tokens: its prefix hit, looked up with `max_tokens`. num_blocks: what it would need to start now.
        """
        if request.was_loaded:
            return False
        chain = request.live_sequences[0].chain
        reach = self._kv.loader.reach(chain, num_cached_tokens, max_tokens, fetch=True)
        if reach is None or not reach.on_disk:
            return False
        request.was_loaded = True  # the request tries this once
        num_tokens = reach.num_blocks * self._kv.block_size - num_cached_tokens
        if not self._kv.connector.is_fetch_worthwhile(len(reach.on_disk), num_tokens):
            return False
        fetch = self._kv.connector.fetch([*reach.on_host, *reach.on_disk])
        self._wait(request, LoadDeferral(fetch, self._now + FETCH_SECONDS, num_blocks))
        return True

    def swap_in(self, request: Request, num_cached_tokens: int, max_tokens: int, num_blocks: int) -> bool:
        """Order host blocks of a request's prefix into this plan; returns whether the request has to wait for the
        copy."""
        if request.num_prefix_swap_ins >= MAX_SWAP_INS:
            return False
        chain = request.live_sequences[0].chain
        reach = self._kv.loader.reach(chain, num_cached_tokens, max_tokens, fetch=False)
        room = self._kv.pool.num_allocatable - self._deferred.num_blocks
        # With sliding windows a longer hit shares fewer blocks than the one on the device, and may not fit.
        if reach is None or self._kv.loader.blocks_to_bring(reach) > room:
            return False
        request.num_prefix_swap_ins += 1
        num_allocated = self._kv.loader.bring(reach)
        self._wait(request, LoadDeferral(None, 0.0, max(0, num_blocks - num_allocated)))
        return True

    def _wait(self, request: Request, wait: LoadDeferral) -> None:
        request.load_deferral = wait
        self._deferred.reserve(request, wait.reserved_blocks)


def stop_waiting(request: Request, kv: KVCacheManager) -> None:
    """End a request's wait for loads; blocks that are not loaded are computed, if the request still lives."""
    wait, request.load_deferral = request.load_deferral, None
    if wait is not None and wait.fetch is not None:
        kv.connector.drop(wait.fetch)
