"""What running requests give up for a waiting one that comes before them in the order of `Request.order_key`.

A request that arrives late can come first in the order, by its priority; and one that comes back from a preemption is
before those that passed it. It then gets its share of the step's tokens before the running ones behind it. And if it
has a better priority than some of them, these may be preempted, under conditions that keep requests from pushing one
another out in turns:

- They come after it in the order and have a worse priority. Requests of one priority never push one another out.
- It lacks rows or blocks, and without them it has enough. Nobody is preempted in vain.
- It could start in this very step: it does not wait for a prefix that is being computed, nor for a sample in flight,
  and the running ones before it leave it some of the token budget.

Who was pushed out stays behind it in the order, and has no right to push it out in turn.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

from quire.decoding.parallel import num_shared_tokens
from quire.kv_cache.manager import KVCacheManager
from quire.request import OrderKey, Request, Sequence
from quire.scheduler.admission import blocks_to_resume, blocks_to_start, has_room
from quire.scheduler.deferred import would_wait
from quire.scheduler.preemption import swapped_blocks


class PreemptionPlan(NamedTuple):
    """What is done so that the first request in the queue can start."""

    victims: list[Request]
    """To be preempted, the last in order first."""
    num_tokens: int
    """Of the step's tokens, those that sequences behind it in the order leave to it."""


NO_PREEMPTION = PreemptionPlan([], 0)


def plan_preemption(
    request: Request,
    running: list[Sequence],
    num_reserved_slots: int,
    kv: KVCacheManager,
    *,
    max_num_seqs: int,
    max_num_tokens: int,
    max_chunk: int,
) -> PreemptionPlan:
    """How `request`, the first that waits, can start before those that run. `NO_PREEMPTION` when it comes after them
    all, or could not start all the same.

    num_reserved_slots: rows of running requests that are not in `running` yet.
    """
    if not running or running[-1].request.order_key < request.order_key:
        return NO_PREEMPTION
    sequences = request.live_sequences
    if any(sequence.num_pending_tokens for sequence in sequences):
        return NO_PREEMPTION
    swapped = swapped_blocks(request)
    if swapped:
        num_blocks, kept = blocks_to_resume(request, kv, max_chunk), kv.host.reused_blocks(swapped)
        num_tokens = 0
    else:
        leader = sequences[0]
        end = num_shared_tokens(request)
        num_cached = kv.match_prefix(leader.chain, leader.token_ids, end - 1)
        if would_wait(request, kv, num_cached, end - 1) is not None:
            return NO_PREEMPTION
        num_blocks = blocks_to_start(request, kv, num_cached, max_chunk)
        kept = kv.hit_blocks(leader.chain, num_cached, leader.token_ids)
        num_tokens = min(end - num_cached, max_chunk)
    candidates = _candidates(request, running)
    num_rows = len(running) + num_reserved_slots + len(sequences)

    def fits(num_victims: int) -> bool:
        given_up = [s for victim in candidates[:num_victims] for s in victim.live_sequences]
        blocks = [s.blocks for s in given_up if s.blocks is not None]
        if num_rows - len(given_up) > max_num_seqs:
            return False
        room = kv.pool.num_allocatable + kv.num_freed_by(blocks, kept)
        return has_room(num_blocks, room, kv, is_alone=len(blocks) == len(running))

    num_victims = bisect.bisect_left(range(len(candidates) + 1), True, key=fits)
    if num_victims > len(candidates):
        return NO_PREEMPTION
    victims = candidates[:num_victims]
    others = [sequence for sequence in running if sequence.request not in victims]
    if _num_tokens_before(others, request.order_key, max_chunk) >= max_num_tokens:
        return NO_PREEMPTION
    return PreemptionPlan(victims, num_tokens)


def _candidates(request: Request, running: list[Sequence]) -> list[Request]:
    """Distinct running requests that come after `request` and have a worse priority, the last in order first."""
    found: list[Request] = []
    for sequence in reversed(running):
        other = sequence.request
        if other.order_key < request.order_key:
            break
        if other.priority > request.priority and (not found or found[-1] is not other):
            found.append(other)
    return found


def _num_tokens_before(running: list[Sequence], order_key: OrderKey, max_chunk: int) -> int:
    """Most tokens of the next step that are not left to a request: all that those before it want, and one each for
    those behind it."""
    return sum(
        min(max_chunk, len(s.token_ids) + s.num_pending_tokens - s.num_computed_tokens)
        if s.request.order_key < order_key
        else 1
        for s in running
    )
