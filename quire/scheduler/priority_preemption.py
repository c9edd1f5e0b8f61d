"""Priority preemption: what running requests give up for a waiting request that comes first in `Request.order_key`.

A late request can come first by its priority, and a preempted request comes before those that started after it. Such a
request gets its share of the step's tokens before the running requests behind it. It may also preempt requests of a
worse priority, under conditions that keep two requests from preempting each other in turns:

- The victims come after it in the order and have a worse priority. Equal priorities never preempt each other.
- It lacks request slots or blocks, and the preemption frees enough of both.
- It can start in this very step: it does not wait for a prefix that is being computed, nor for a sample in flight, and
  the running requests before it leave it some of the token budget.

A victim stays behind the request in the order and cannot preempt it in turn.
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
    """The victims and tokens that let the first waiting request start."""

    victims: list[Request]
    """Running requests to preempt, the last in order first."""
    num_tokens: int
    """Tokens of the step that the running sequences behind the request leave to it."""


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
    """Plan how the first waiting request can start before running ones. `NO_PREEMPTION` when it comes after all of
    them, or cannot start even so.

    num_reserved_slots: request slots reserved for siblings that are not in `running` yet.
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
    num_slots = len(running) + num_reserved_slots + len(sequences)

    def fits(num_victims: int) -> bool:
        given_up = [s for victim in candidates[:num_victims] for s in victim.live_sequences]
        blocks = [s.blocks for s in given_up if s.blocks is not None]
        if num_slots - len(given_up) > max_num_seqs:
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
    """Most tokens of the next step that running sequences take before a request: all that sequences before it in the
    order can use, and one for each sequence behind it."""
    return sum(
        min(max_chunk, len(s.token_ids) + s.num_pending_tokens - s.num_computed_tokens)
        if s.request.order_key < order_key
        else 1
        for s in running
    )
