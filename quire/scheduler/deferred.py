"""Sharing in flight: of requests that arrive together with the same new prefix, one computes it.

A waiting request whose next blocks a running sequence computes is passed over: it starts when they are there, with a
prefix hit. It is looked at again in every step, in its place in the queue, and nothing can keep it there:

- It waits for one live sequence to commit a given number of blocks. Running sequences get tokens in every step, so that
  sequence advances; if it is aborted or preempted instead, the wait is over, and the first request that waited computes
  the rest itself.
- A step is never empty because of it: the sequence that is waited for is in this step's plan, or in one in flight.
- Nobody passes a request that was preempted. Whoever passes another one takes nothing that it needs: rows and blocks
  for the whole request are set aside, and only a prompt that fits into what is left of the step may pass, which takes
  one token a step afterwards.
- After the wait it is first again. It may have to wait once more, if by then a sequence computes further blocks that it
  shares; but each leaves it fewer to wait for (docs/decisions/0005-sharing-in-flight.md).
"""

from __future__ import annotations

from quire.kv_cache.manager import BlockTable, KVCacheManager
from quire.request import Request, RequestStatus, Wait

MIN_SHARED_BLOCKS = 2
"""To share fewer is not worth the wait: a step reads all weights, which costs about as much as a block of tokens."""


class DeferredRequests:
    """The requests that wait in one pass of `Scheduler.schedule`, and their claims."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self.num_rows = 0
        self.num_blocks = 0
        self.has_preempted = False
        """One of them ran before: then nobody passes."""

    def __bool__(self) -> bool:
        return self.num_rows > 0

    def keeps_waiting(self, request: Request) -> bool:
        """Whether a request waits on, decided in constant time."""
        if not waits_on(request, self._kv) or request.wait is None:
            return False
        self.reserve(request, request.wait.reserved_blocks)
        return True

    def defer(self, request: Request, num_cached_tokens: int, max_tokens: int, num_blocks: int) -> bool:
        """Whether a request has to wait from now on.

        num_cached_tokens: its prefix hit, looked up with `max_tokens`. num_blocks: what it would need to start now.
        """
        found = would_wait(request, self._kv, num_cached_tokens, max_tokens)
        if found is None:
            return False
        request.wait = Wait(*found, num_blocks)
        self.reserve(request, num_blocks)
        return True

    def reserve(self, request: Request, num_blocks: int) -> None:
        """A request waits: its rows and so many blocks are set aside."""
        self.has_preempted |= request.status is RequestStatus.PREEMPTED
        self.num_rows += len(request.live_sequences)
        self.num_blocks += num_blocks


def waits_on(request: Request, kv: KVCacheManager) -> bool:
    """Whether a running sequence still computes what a request waits for. A wait that is over ends here."""
    wait = request.wait
    if wait is not None and not kv.is_pending_in(wait.leader, wait.num_blocks):
        request.wait = None
    return request.wait is not None


def would_wait(
    request: Request, kv: KVCacheManager, num_cached_tokens: int, max_tokens: int
) -> tuple[BlockTable, int] | None:
    """Whom a request would wait for, and for how many leading blocks, behind a prefix hit that was looked up with
    `max_tokens`; None when it would start."""
    found = kv.find_pending(request.live_sequences[0].chain, num_cached_tokens, max_tokens)
    if found is None or found[1] - num_cached_tokens // kv.block_size < MIN_SHARED_BLOCKS:
        return None
    return found
