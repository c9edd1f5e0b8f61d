"""Deferred requests: of requests that arrive together with the same new prefix, one computes it and the others wait.

The scheduler defers a waiting request whose next blocks a running sequence computes, and starts it with a prefix hit
when the blocks are cached. Every step looks at the request in its place in the queue, and every wait ends:

- The request waits for one live sequence (the leader) to commit a given number of blocks. Running sequences get tokens
  in every step, so the leader advances; when the leader is aborted or preempted, the wait is over, and the first
  deferred request computes the rest itself.
- A deferral never leaves a step empty: the leader is in this step's plan, or in one in flight.
- While a preempted request is deferred, no later request starts. A request that starts before a deferred one takes
  nothing from it: request slots and blocks for the whole deferred request are reserved, and the later prompt must fit
  into the rest of this step's budget, after which it takes one token a step.
- After the wait the request is first again. It may be deferred once more, if by then a sequence computes further
  shared blocks; each deferral leaves fewer blocks to wait for (docs/decisions/0005-sharing-in-flight.md).
"""

from __future__ import annotations

from quire.kv_cache.block_table import BlockTable
from quire.kv_cache.manager import KVCacheManager
from quire.request import Request, RequestStatus, Wait

MIN_SHARED_BLOCKS = 2
"""A wait for fewer blocks does not pay: a step reads all weights, which costs about as much as a block of tokens."""


class DeferredRequests:
    """The requests deferred in one pass of `Scheduler.schedule`, and their reservations."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self.num_slots = 0
        self.num_blocks = 0
        self.has_preempted = False
        """Whether one of them ran before: then no later request starts."""

    def __bool__(self) -> bool:
        return self.num_slots > 0

    def keeps_waiting(self, request: Request) -> bool:
        """Whether a deferred request keeps waiting; if so, reserve for it. Constant time."""
        if not waits_on(request, self._kv) or request.wait is None:
            return False
        self.reserve(request, request.wait.reserved_blocks)
        return True

    def defer(self, request: Request, num_cached_tokens: int, max_tokens: int, num_blocks: int) -> bool:
        """Defer a request if a running sequence computes its next blocks; returns whether it did.

        num_cached_tokens: its prefix hit, looked up with `max_tokens`. num_blocks: what it would need to start now.
        """
        found = would_wait(request, self._kv, num_cached_tokens, max_tokens)
        if found is None:
            return False
        request.wait = Wait(*found, num_blocks)
        self.reserve(request, num_blocks)
        return True

    def reserve(self, request: Request, num_blocks: int) -> None:
        """Reserve request slots and `num_blocks` blocks for a deferred request."""
        self.has_preempted |= request.status is RequestStatus.PREEMPTED
        self.num_slots += len(request.live_sequences)
        self.num_blocks += num_blocks


def waits_on(request: Request, kv: KVCacheManager) -> bool:
    """Whether the leader still computes the blocks that a deferred request waits for. Clears a wait that is over."""
    wait = request.wait
    if wait is not None and not kv.is_pending_in(wait.leader, wait.num_blocks):
        request.wait = None
    return request.wait is not None


def would_wait(
    request: Request, kv: KVCacheManager, num_cached_tokens: int, max_tokens: int
) -> tuple[BlockTable, int] | None:
    """(leader, number of leading blocks) that a request would wait for; None when it can start now. Arguments as for
    `DeferredRequests.defer`."""
    found = kv.find_pending(request.live_sequences[0].chain, num_cached_tokens, max_tokens)
    if found is None or found[1] - num_cached_tokens // kv.block_size < MIN_SHARED_BLOCKS:
        return None
    return found
