"""Admission: which requests can ever run, which prefixes may be registered, and how much memory a waiting request needs
before it starts.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.decoding.parallel import num_shared_tokens
from quire.errors import PromptTooLongError, UserError
from quire.kv_cache.manager import KVCacheManager
from quire.request import Request
from quire.scheduler.preemption import swapped_blocks

WATERMARK = 0.01
"""Share of the pool kept free when a request is admitted beside others, so that it is not preempted at once."""


def refuse_impossible(
    request: Request, kv: KVCacheManager, num_usable: int, *, max_num_seqs: int, max_chunk: int
) -> None:
    """Raise PromptTooLongError when the request could not finish even alone, with `num_usable` blocks to itself, the
    pool without what registered prefixes hold or are to hold.

    Whatever passes can always run: preempting everybody else makes room for it, so nothing starves.
    """
    params = request.params
    n, name = params.num_sequences, "n" if params.best_of is None else "best_of"
    if n > max_num_seqs:
        raise PromptTooLongError(f"{name}={n} exceeds the engine's max_num_seqs of {max_num_seqs}", param=name)
    needed = blocks_at_most(request, kv, max_chunk)
    if needed > num_usable:
        pinned = "" if num_usable == kv.pool.num_usable else f", {kv.pool.num_usable - num_usable} more are pinned"
        raise PromptTooLongError(
            f"the request needs up to {needed} KV blocks ({request.num_prompt_tokens} prompt tokens, max_tokens="
            f"{request.max_tokens}, {name}={n}), and the KV cache has {num_usable}{pinned}; lower max_tokens or "
            f"{name}, or give the KV cache more memory",
            param="max_tokens",
        )


def blocks_at_most(request: Request, kv: KVCacheManager, max_chunk: int) -> int:
    """Blocks that the request can come to hold, less those of a registered prefix that it shares whatever happens."""
    n = request.params.num_sequences
    # The last sampled token needs no KV.
    total = request.num_prompt_tokens + request.max_tokens - 1
    if n == 1:
        needed = kv.most_blocks(total, max_chunk)
    else:
        needed = _blocks_of_siblings(request.num_prompt_tokens, kv, [total] * n)
    if request.bypass_prefix_cache:
        return needed
    return needed - kv.num_always_shared(request.cache_salt, request.prompt_token_ids)


def blocks_to_start(request: Request, kv: KVCacheManager, num_cached_tokens: int, max_chunk: int) -> int:
    """How many blocks fewer others could take, if the request had all that its known tokens need (and one more each).

    Not just the first chunk's: that would start requests that are preempted halfway, work thrown away.
    """
    leader = request.live_sequences[0]
    free, held = kv.room_after_match(leader.chain, num_cached_tokens, leader.token_ids)
    return kv.pool.num_allocatable - free + max(0, _blocks_in_use(request, kv, max_chunk) - held)


def blocks_to_resume(request: Request, kv: KVCacheManager, max_chunk: int) -> int:
    """The same for a request that is swapped out and would be swapped in."""
    free, held = kv.room_after_swap_in(swapped_blocks(request))
    return kv.pool.num_allocatable - free + max(0, _blocks_in_use(request, kv, max_chunk) - held)


def has_room(num_blocks: int, room: int, kv: KVCacheManager, *, is_alone: bool) -> bool:
    """Whether a request that takes `num_blocks` may start when the pool has `room` blocks for it."""
    reserve = 0 if is_alone else int(WATERMARK * kv.num_unregistered_blocks)
    return num_blocks + reserve <= room


def _blocks_in_use(request: Request, kv: KVCacheManager, max_chunk: int) -> int:
    """Blocks that the request holds when all its known tokens are computed (and one more each)."""
    sequences = request.live_sequences
    # A place without a beam still has the tokens of its last one: it counts as what it may become.
    known = [len((sequences[0] if request.beam_search else sequence).token_ids) for sequence in sequences]
    # One more token each than known, but never more than the bound of `refuse_impossible`.
    lengths = [min(length + 1, sequences[0].max_total_tokens - 1) for length in known]
    if len(lengths) == 1:
        return kv.most_blocks(lengths[0], max_chunk)
    return _blocks_of_siblings(num_shared_tokens(request), kv, lengths)


def _blocks_of_siblings(num_shared: int, kv: KVCacheManager, lengths: list[int]) -> int:
    """Blocks of forked sequences: the full blocks of what they share once, the rest each (windows are not counted
    on)."""
    size = kv.block_size
    shared = num_shared // size
    return kv.num_groups * (shared + sum(-(-length // size) - shared for length in lengths))


class PrefixRegistration:
    """The prefixes on their way: their blocks are set aside from the acceptance on, until the KV manager pins them."""

    def __init__(self, kv: KVCacheManager, max_chunk: int) -> None:
        self._kv = kv
        self._max_chunk = max_chunk
        self._reserved: dict[str, int] = {}

    @property
    def num_usable(self) -> int:
        """Blocks that requests can count on."""
        return self._kv.num_unregistered_blocks - sum(self._reserved.values())

    def check_registration(self, prefix: Request, others: Iterable[Request]) -> None:
        """Raise UserError when `prefix` may not be registered beside `others`, all requests that have not ended."""
        kv = self._kv
        if not kv.enable_prefix_caching:
            raise UserError("a registered prefix needs enable_prefix_caching=True", param="enable_prefix_caching")
        if kv.is_registered(prefix.request_id):
            raise UserError(f"a prefix {prefix.request_id!r} is registered already", param="request_id")
        left = self.num_usable - blocks_at_most(prefix, kv, self._max_chunk)
        # A request that goes on behind the prefix computes one token and generates one; another has two.
        num_shared = prefix.num_prompt_tokens // kv.block_size
        behind = kv.most_blocks(prefix.num_prompt_tokens + 1, self._max_chunk) - num_shared * kv.num_groups_kept
        if left < max(behind, kv.num_groups):
            raise PromptTooLongError(
                f"a prefix of {prefix.num_prompt_tokens} tokens would leave {max(0, left)} KV blocks to requests, too "
                f"few for one that goes on behind it ({max(behind, kv.num_groups)}): give the KV cache more memory, or "
                "unregister other prefixes",
                param="prompt",
            )
        needed = max((blocks_at_most(r, kv, self._max_chunk) for r in others if not r.register_prefix), default=0)
        if left < needed:
            raise UserError(
                f"a prefix of {prefix.num_prompt_tokens} tokens would leave {left} KV blocks to requests, and one that "
                f"is running or waiting may need {needed}: register it later",
                param="prompt",
            )

    def reserve(self, prefix: Request) -> None:
        self._reserved[prefix.request_id] = blocks_at_most(prefix, self._kv, self._max_chunk)

    def release(self, prefix: Request) -> None:
        """The prefix is registered, or was given up."""
        del self._reserved[prefix.request_id]
