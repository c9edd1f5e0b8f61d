"""Waiting requests whose prefix goes on below the device: in host memory, or on disk.

Such a request is passed over while its blocks come, like one whose prefix a running sequence computes
(quire/scheduler/deferred.py): it keeps its place, its rows and blocks are set aside, and it is looked at again in every
step.

- From disk it waits once, for as long as the loads take and at most FETCH_SECONDS. A load always ends, well or badly;
  what did not come is computed.
- From the host it waits for one plan, which swaps the blocks in. In the next pass it is in its place again and starts
  with a plain hit; if it cannot after all, its blocks are cached and nobody's. It may try MAX_SWAP_INS times, then it
  computes.
- Nobody is pushed out for it before its blocks have come from disk (quire/scheduler/priority_preemption.py).
- Nothing that runs waits for it: blocks that it holds meanwhile are given up before anybody is preempted.
- When nothing else is to be computed, the plan goes out with its transfers alone, and its result waits a while for
  them to end, so that the engine does not turn round and round.
"""

from __future__ import annotations

from quire.decoding.parallel import num_shared_tokens
from quire.kv_cache.manager import KVCacheManager
from quire.request import LoadDeferral, Request
from quire.scheduler.admission import blocks_to_start
from quire.scheduler.deferred import DeferredRequests
from quire.scheduler.preemption import swapped_blocks

FETCH_SECONDS = 10.0
"""A disk that takes longer has failed, or might as well have."""
MAX_SWAP_INS = 3


class ConnectorLoads:
    """The requests that wait for the tiers below in one pass of `Scheduler.schedule`; their claims go to `passed`."""

    def __init__(self, kv: KVCacheManager, passed: DeferredRequests, now: float) -> None:
        self._kv = kv
        self._deferred = passed
        self._now = now

    def keeps_waiting(self, request: Request) -> bool:
        """Whether a request waits on."""
        if not self.waits_on(request) or request.load_deferral is None:
            return False
        self._deferred.reserve(request, request.load_deferral.reserved_blocks)
        return True

    def waits_on(self, request: Request) -> bool:
        """The same without a claim. A wait that is over ends here."""
        wait = request.load_deferral
        if wait is None:
            return False
        if wait.fetch is not None and wait.fetch.is_pending and self._now < wait.deadline:
            return True
        # What was fetched is now the most recent of the host's content, and is asked for in a moment.
        stop_waiting(request, self._kv)
        return False

    def fetch_before_start(self, request: Request, max_chunk: int) -> bool:
        """Whether a request, which others would have to make way for, has to wait for blocks from disk from now on:
        they run on until it can start."""
        if swapped_blocks(request):
            return False
        leader, max_tokens = request.live_sequences[0], num_shared_tokens(request) - 1
        num_cached = self._kv.match_prefix(leader.chain, leader.token_ids, max_tokens)
        num_blocks = blocks_to_start(request, self._kv, num_cached, max_chunk)
        return self.fetch(request, num_cached, max_tokens, num_blocks)

    def fetch(self, request: Request, num_cached_tokens: int, max_tokens: int, num_blocks: int) -> bool:
        """Whether a request has to wait for blocks from disk from now on.

        num_cached_tokens: its prefix hit, looked up with `max_tokens`. num_blocks: what it would need to start now.
        """
        if request.was_loaded:
            return False
        chain = request.live_sequences[0].chain
        reach = self._kv.loader.reach(chain, num_cached_tokens, max_tokens, fetch=True)
        if reach is None or not reach.on_disk:
            return False
        request.was_loaded = True  # or it was decided, once, to do without
        num_tokens = reach.num_blocks * self._kv.block_size - num_cached_tokens
        if not self._kv.connector.is_fetch_worthwhile(len(reach.on_disk), num_tokens):
            return False
        fetch = self._kv.connector.fetch([*reach.on_host, *reach.on_disk])
        self._wait(request, LoadDeferral(fetch, self._now + FETCH_SECONDS, num_blocks))
        return True

    def swap_in(self, request: Request, num_cached_tokens: int, max_tokens: int, num_blocks: int) -> bool:
        """Whether a request, for which there is room, has to wait for this plan to swap in blocks of its prefix."""
        if request.num_prefix_swap_ins >= MAX_SWAP_INS:
            return False
        chain = request.live_sequences[0].chain
        reach = self._kv.loader.reach(chain, num_cached_tokens, max_tokens, fetch=False)
        room = self._kv.pool.num_allocatable - self._deferred.num_blocks
        # Where windows slide, a longer hit shares less with others than the one on the device, and may not fit.
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
    """The request goes on without what has not come, or is gone."""
    wait, request.load_deferral = request.load_deferral, None
    if wait is not None and wait.fetch is not None:
        kv.connector.drop(wait.fetch)
