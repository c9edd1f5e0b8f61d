"""Preemption: release of running requests' KV blocks (docs/preemption.md), and the choice of victims for an earlier
waiting request.

A request that comes first in `Request.order_key`, or behind deferred ones while background requests run, may preempt
requests of a worse priority, if

- the victims come after it in the order and have a worse priority (equal priorities never preempt each other);
- it lacks request slots or blocks, and the preemption frees enough of both;
- it can start in this very step: it is not deferred, has no sample in flight, and the running requests before it leave
  some token budget.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from quire.decoding.parallel import num_shared_tokens
from quire.decoding.sequence import OrderKey, Request, Sequence
from quire.kv_cache.host_pool import Footprint
from quire.kv_cache.manager import KVCacheManager
from quire.scheduler.admission import Limits, Quote, has_room
from quire.scheduler.gates import Reservations
from quire.scheduler.running import RunningSet


@dataclass(frozen=True)
class PreemptionCosts:
    """Measured costs. seconds_per_block: copy of one block, all its pages, between device and host. seconds_per_token:
    one token of a prompt, computed among many."""

    seconds_per_block: float
    seconds_per_token: float


class Choice(Protocol):
    """Rule for swapping a victim rather than recomputing it; depends on its arguments alone."""

    def __call__(self, footprint: Footprint, num_recomputed_tokens: int) -> bool:
        """True to swap, False to recompute. num_recomputed_tokens: tokens to recompute, less those surely in the prefix
        cache."""
        ...


def choice(mode: str, costs: PreemptionCosts | None) -> Choice:
    """Rule of a preemption mode (swap or recompute); "auto" needs costs."""
    match mode:
        case "recompute":
            return lambda _footprint, _num_tokens: False
        case "swap":
            return lambda _footprint, _num_tokens: True
        case "auto":
            assert costs is not None, "preemption_mode 'auto' needs measured costs"
            return Cheaper(costs)
    raise AssertionError(f"unknown preemption mode {mode!r}")


class Cheaper:
    """Rule of "auto": swap if copying out and back takes less time than recomputing, by PreemptionCosts."""

    def __init__(self, costs: PreemptionCosts) -> None:
        self._costs = costs

    def __call__(self, footprint: Footprint, num_recomputed_tokens: int) -> bool:
        num_copies = footprint.num_blocks_out + footprint.num_blocks_in
        return num_copies * self._costs.seconds_per_block < num_recomputed_tokens * self._costs.seconds_per_token


def release_blocks(request: Request, kv: KVCacheManager, prefers_swap: Choice) -> list[tuple[int, int]] | None:
    """Move a victim's blocks to the host, or drop them. Returns the (device, host) copies for the plan; None when they
    were dropped."""
    copies = swap_out(request, kv, prefers_swap)
    if copies is None:
        request.num_lost_tokens += computed_tokens(request)
        for sequence in request.live_sequences:
            if sequence.blocks is not None:
                kv.free(sequence.blocks)
                sequence.blocks = None
            sequence.num_computed_tokens = 0
    return copies


def swap_out(request: Request, kv: KVCacheManager, prefers_swap: Choice) -> list[tuple[int, int]] | None:
    """Move a victim's blocks to the host. Returns the plan's copies, or None, with nothing changed, if the request must
    be recomputed."""
    sequences = [sequence for sequence in request.live_sequences if sequence.blocks is not None]
    handles = [sequence.blocks for sequence in sequences if sequence.blocks is not None]
    num_computed = [sequence.num_computed_tokens for sequence in sequences]
    if kv.host.blocks.num_usable == 0 or not any(num_computed):
        return None
    in_flight = any(sequence.num_pending_tokens for sequence in sequences)
    if in_flight and (request.register_prefix or request.beam_search is not None):
        # The update with these samples needs the blocks: it registers them, or reorders the beams.
        return None
    if request.beam_search is not None and request.beam_search.has_candidates:
        return None  # the beams are reordered when their matchers have answered
    if any(sequence.num_pending_drafts for sequence in sequences):
        return None  # how many of the tokens are computed is not known
    footprint = kv.footprint(handles)
    num_tokens = computed_tokens(request) - footprint.num_retained_blocks * kv.hash_block_size
    copies = kv.swap_out(handles, num_computed) if prefers_swap(footprint, num_tokens) else None
    if copies is not None:
        for sequence in sequences:
            sequence.swapped, sequence.blocks = sequence.blocks, None
    return copies


def swap_in(request: Request, kv: KVCacheManager) -> tuple[list[Sequence], list[tuple[int, int]]]:
    """Swap a request in; returns the sequences that own blocks again, and the plan's copies."""
    sequences = [sequence for sequence in request.live_sequences if sequence.swapped is not None]
    copies = kv.swap_in(request.swapped_blocks)
    for sequence in sequences:
        sequence.blocks, sequence.swapped = sequence.swapped, None
    return sequences, copies


def computed_tokens(request: Request) -> int:
    """Number of tokens to compute again if the request lost its blocks; siblings' shared tokens count once."""
    computed = [sequence.num_computed_tokens for sequence in request.live_sequences if sequence.blocks is not None]
    num_shared = num_shared_tokens(request) if len(computed) > 1 else 0
    return sum(computed) - num_shared * (len(computed) - 1)


class PreemptionPlan(NamedTuple):
    victims: list[Request]
    """Running requests to preempt, the last in order first."""
    num_tokens: int
    """Tokens of the step that running sequences behind the request leave to it."""
    order_key: OrderKey | None = None
    """Request's place in the order."""


NO_PREEMPTION = PreemptionPlan([], 0)


def comes_before_running(request: Request, running: list[Sequence]) -> bool:
    """True if the first waiting request comes before a running one and no earlier plan still samples for it."""
    if not running or running[-1].request.order_key < request.order_key:
        return False
    return not any(sequence.num_pending_tokens for sequence in request.live_sequences)


def plan_preemption(
    request: Request, needs: Quote, running_set: RunningSet, kv: KVCacheManager, limits: Limits, reserved: Reservations
) -> PreemptionPlan:
    """Plan the start of a waiting request that `comes_before_running`; `NO_PREEMPTION` if impossible. reserved:
    needs of the deferred requests before it."""
    running = running_set.sequences
    if needs.is_resumed:
        kept = kv.host.reused_blocks(request.swapped_blocks)
    else:
        leader = request.live_sequences[0]
        kept = kv.hit_blocks(leader.chain, needs.num_cached_tokens, leader.token_ids)
    candidates = _candidates(request, running)
    num_slots = running_set.num_slots + reserved.num_slots + needs.num_slots

    def fits(num_victims: int) -> bool:
        given_up = [s for victim in candidates[:num_victims] for s in victim.live_sequences]
        blocks = [s.blocks for s in given_up if s.blocks is not None]
        if num_slots - len(given_up) > limits.max_num_seqs:
            return False
        room = kv.pool.num_allocatable - reserved.num_blocks + kv.num_freed_by(blocks, kept)
        return has_room(needs.num_blocks, room, kv, is_alone=len(blocks) == len(running))

    num_victims = bisect.bisect_left(range(len(candidates) + 1), True, key=fits)
    if num_victims > len(candidates):
        return NO_PREEMPTION
    victims = candidates[:num_victims]
    others = [sequence for sequence in running if sequence.request not in victims]
    num_left = limits.max_num_tokens - _num_tokens_before(others, request.order_key, limits.max_chunk)
    num_tokens = min(needs.num_new_tokens, limits.max_chunk)
    num_needed = max(1, needs.num_new_tokens if reserved else 1)  # behind a deferred request a prompt starts whole
    if num_needed > min(num_left, limits.max_chunk):
        return NO_PREEMPTION
    return PreemptionPlan(victims, num_tokens, request.order_key)


def _candidates(request: Request, running: list[Sequence]) -> list[Request]:
    found: list[Request] = []
    for sequence in reversed(running):
        other = sequence.request
        if other.order_key < request.order_key:
            break
        if other.priority > request.priority and (not found or found[-1] is not other):
            found.append(other)
    return found


def _num_tokens_before(running: list[Sequence], order_key: OrderKey, max_chunk: int) -> int:
    return sum(
        min(max_chunk, len(s.token_ids) + s.num_pending_tokens - s.num_computed_tokens)
        if s.request.order_key < order_key
        else 1
        for s in running
    )
