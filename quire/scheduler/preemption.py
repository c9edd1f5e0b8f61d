"""How a preemption frees the KV blocks of a request: they are dropped and recomputed, or swapped to the host (§4.5).

Whole requests only: all sequences move together or none. When the host pool has no room for a victim, that victim is
recomputed, whatever the mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from quire.decoding.parallel import num_shared_tokens
from quire.kv_cache.block_table import BlockTable
from quire.kv_cache.host_pool import Footprint
from quire.kv_cache.manager import KVCacheManager
from quire.request import Request, Sequence


@dataclass(frozen=True)
class PreemptionCosts:
    """Costs that the worker measured. seconds_per_block: to copy one block, all its pages, between device and host.
    seconds_per_token: to compute one token of a prompt, many at a time."""

    seconds_per_block: float
    seconds_per_token: float


class Choice(Protocol):
    """Whether to swap a victim rather than to recompute it. Depends on its arguments alone."""

    def __call__(self, footprint: Footprint, num_recomputed_tokens: int) -> bool:
        """num_recomputed_tokens: what recomputation would compute, prefix hits that are certain taken off."""
        ...


def choice(mode: str, costs: PreemptionCosts | None) -> Choice:
    """The rule of a preemption mode. costs: needed by "auto"."""
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
    """Swaps when copying out and back takes less time than computing again."""

    def __init__(self, costs: PreemptionCosts) -> None:
        self._costs = costs

    def __call__(self, footprint: Footprint, num_recomputed_tokens: int) -> bool:
        num_copies = footprint.num_blocks_out + footprint.num_blocks_in
        return num_copies * self._costs.seconds_per_block < num_recomputed_tokens * self._costs.seconds_per_token


def swap_out(request: Request, kv: KVCacheManager, prefers_swap: Choice) -> list[tuple[int, int]] | None:
    """Move a victim's blocks to the host. Returns the copies for the plan, or None, having changed nothing, when the
    request is to be recomputed: it is cheaper, the host pool is too full, nothing is computed yet, or the update of a
    plan in flight needs the blocks."""
    sequences = [sequence for sequence in request.live_sequences if sequence.blocks is not None]
    handles = [sequence.blocks for sequence in sequences if sequence.blocks is not None]
    num_computed = [sequence.num_computed_tokens for sequence in sequences]
    if kv.host.blocks.num_usable == 0 or not any(num_computed):
        return None
    in_flight = any(sequence.num_pending_tokens for sequence in sequences)
    if in_flight and (request.register_prefix or request.beam_search is not None):
        # The update with these samples needs the blocks: it registers them, or reorders the beams.
        return None
    footprint = kv.footprint(handles)
    num_tokens = computed_tokens(request) - footprint.num_retained_blocks * kv.block_size
    copies = kv.swap_out(handles, num_computed) if prefers_swap(footprint, num_tokens) else None
    if copies is not None:
        for sequence in sequences:
            sequence.swapped, sequence.blocks = sequence.blocks, None
    return copies


def swap_in(request: Request, kv: KVCacheManager) -> tuple[list[Sequence], list[tuple[int, int]]]:
    """Bring a swapped request back: the sequences that own blocks again, and the copies for the plan."""
    sequences = [sequence for sequence in request.live_sequences if sequence.swapped is not None]
    copies = kv.swap_in(swapped_blocks(request))
    for sequence in sequences:
        sequence.blocks, sequence.swapped = sequence.swapped, None
    return sequences, copies


def swapped_blocks(request: Request) -> list[BlockTable]:
    """The handles of those of a request's sequences that are in the host pool; none: it is not swapped."""
    return [sequence.swapped for sequence in request.live_sequences if sequence.swapped is not None]


def computed_tokens(request: Request) -> int:
    """Tokens that the request would compute again if it lost its blocks: what siblings share is computed once."""
    computed = [sequence.num_computed_tokens for sequence in request.live_sequences if sequence.blocks is not None]
    num_shared = num_shared_tokens(request) if len(computed) > 1 else 0
    return sum(computed) - num_shared * (len(computed) - 1)
