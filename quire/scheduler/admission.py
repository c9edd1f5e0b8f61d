"""Who may start: the refusal at the door, and the memory test before a waiting request runs."""

from __future__ import annotations

from quire.errors import PromptTooLongError
from quire.kv_cache.manager import KVCacheManager
from quire.request import Request
from quire.scheduler.preemption import swapped_blocks

WATERMARK = 0.01
"""Share of the pool kept free when a request is admitted beside others, so that it is not preempted at once."""


def refuse_impossible(request: Request, kv: KVCacheManager, max_num_seqs: int, max_chunk: int) -> None:
    """Raise PromptTooLongError when the request could not finish even alone, with the whole pool to itself.

    Whatever passes can always run: preempting everybody else makes room for it, so nothing starves.
    """
    n = request.params.n
    if n > max_num_seqs:
        raise PromptTooLongError(f"n={n} exceeds the engine's max_num_seqs of {max_num_seqs}", param="n")
    # The last sampled token needs no KV.
    total = request.num_prompt_tokens + request.max_tokens - 1
    needed = kv.most_blocks(total, max_chunk) if n == 1 else _blocks_of_siblings(request, kv, [total] * n)
    if needed > kv.pool.num_usable:
        raise PromptTooLongError(
            f"the request needs up to {needed} KV blocks ({request.num_prompt_tokens} prompt tokens, max_tokens="
            f"{request.max_tokens}, n={n}), and the KV cache has {kv.pool.num_usable}; lower max_tokens or n, or "
            "give the KV cache more memory",
            param="max_tokens",
        )


def blocks_to_start(request: Request, kv: KVCacheManager, num_cached_tokens: int, max_chunk: int) -> int:
    """How many blocks fewer others could take, if the request had all that its known tokens need (and one more each).

    Not just the first chunk's: that would start requests that are preempted halfway, work thrown away.
    """
    free, held = kv.room_after_match(request.live_sequences[0].chain, num_cached_tokens)
    return kv.pool.num_allocatable - free + max(0, _blocks_in_use(request, kv, max_chunk) - held)


def blocks_to_resume(request: Request, kv: KVCacheManager, max_chunk: int) -> int:
    """The same for a request that is swapped out and would be swapped in."""
    free, held = kv.room_after_swap_in(swapped_blocks(request))
    return kv.pool.num_allocatable - free + max(0, _blocks_in_use(request, kv, max_chunk) - held)


def has_room(num_blocks: int, room: int, kv: KVCacheManager, *, is_alone: bool) -> bool:
    """Whether a request that takes `num_blocks` may start when the pool has `room` blocks for it."""
    reserve = 0 if is_alone else int(WATERMARK * kv.pool.num_usable)
    return num_blocks + reserve <= room


def _blocks_in_use(request: Request, kv: KVCacheManager, max_chunk: int) -> int:
    """Blocks that the request holds when all its known tokens are computed (and one more each)."""
    sequences = request.live_sequences
    # One more token each than known, but never more than the bound of `refuse_impossible`.
    lengths = [min(len(sequence.token_ids) + 1, sequence.max_total_tokens - 1) for sequence in sequences]
    if len(lengths) == 1:
        return kv.most_blocks(lengths[0], max_chunk)
    return _blocks_of_siblings(request, kv, lengths)


def _blocks_of_siblings(request: Request, kv: KVCacheManager, lengths: list[int]) -> int:
    """Blocks of forked sequences: the prompt's full blocks once, the rest each (windows are not counted on)."""
    size = kv.block_size
    shared = request.num_prompt_tokens // size
    return kv.num_groups * (shared + sum(-(-length // size) - shared for length in lengths))
