"""Admission of requests and prefixes, and the needs of a waiting request."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import NamedTuple

from quire.decoding.parallel import num_shared_tokens
from quire.decoding.sequence import Request
from quire.errors import PromptTooLongError, UserError
from quire.kv_cache.block_hash import HashChain
from quire.kv_cache.manager import KVCacheManager

WATERMARK = 0.01
"""Share of the pool kept free when a request joins others."""


class Limits(NamedTuple):
    max_num_seqs: int
    max_num_tokens: int
    max_chunk: int
    """Limit of tokens of one sequence in a step."""
    whole_prompts: bool = False
    """Each prompt is computed in one step."""


class Quote(NamedTuple):
    """Needs of a waiting request to start now, looked up once in a pass of `Scheduler.schedule`."""

    num_cached_tokens: int
    """Prefix hit in tokens, which never ends inside a whole image; 0 when resumed."""
    max_cached_tokens: int
    """Longest hit that the request could use."""
    num_new_tokens: int
    """Tokens that its first sequence computes; 0 when resumed."""
    num_blocks: int
    """Blocks that the start takes from the pool, for all known tokens and one more per sequence."""
    num_slots: int
    """Request slots: one per live sequence."""
    room: int
    """Blocks that the pool can give, without those reserved for deferred requests."""
    is_resumed: bool
    """The request is swapped in and recomputes nothing."""


def quote(request: Request, kv: KVCacheManager, max_chunk: int, num_reserved_blocks: int = 0) -> Quote:
    """Needs of a waiting request, before it is admitted or preempts others. max_chunk: most tokens of a step.
    num_reserved_blocks: blocks of requests deferred before it."""
    sequences, swapped, allocatable = request.live_sequences, request.swapped_blocks, kv.pool.num_allocatable
    num_cached = max_cached = num_new = 0
    if swapped:
        free, held = kv.room_after_swap_in(swapped)
    else:
        leader, num_known = sequences[0], num_shared_tokens(request)
        max_cached = num_known - 1
        num_cached = kv.match_prefix(leader.chain, leader.token_ids, max_cached)
        for image in reversed(request.images):
            if image.is_whole and image.start < num_cached < image.end:
                num_cached = kv.match_prefix(leader.chain, leader.token_ids, image.start)
        num_new = num_known - num_cached
        free, held = kv.room_after_match(leader.chain, num_cached, leader.token_ids)
    return Quote(
        num_cached_tokens=num_cached,
        max_cached_tokens=max_cached,
        num_new_tokens=num_new,
        num_blocks=allocatable - free + max(0, blocks_in_use(request, kv, max_chunk) - held),
        num_slots=len(sequences),
        room=allocatable - num_reserved_blocks,
        is_resumed=bool(swapped),
    )


def reject_impossible(request: Request, kv: KVCacheManager, num_usable: int, limits: Limits) -> None:
    """Raise UserError for contradictory settings, PromptTooLongError for a request that could not finish even alone in
    the pool. num_usable: blocks that registered prefixes neither hold nor reserve."""
    params = request.params
    n, name = params.num_sequences, "n" if params.best_of is None else "best_of"
    if params.use_beam_search and request.pooling:
        raise UserError("a pooled request has no tokens: it takes no beam search", param="use_beam_search")
    if request.pooling and n > 1:
        raise UserError(f"a pooled request has one vector: {name} must be 1, not {n}", param=name)
    if n > limits.max_num_seqs:
        raise PromptTooLongError(f"{name}={n} exceeds the engine's max_num_seqs of {limits.max_num_seqs}", param=name)
    if limits.whole_prompts and request.num_prompt_tokens > limits.max_num_tokens:
        raise PromptTooLongError(
            f"the prompt has {request.num_prompt_tokens} tokens, and this model computes prompts in one step, of up to "
            f"{limits.max_num_tokens} (max_num_batched_tokens)",
            param="prompt",
        )
    needed = blocks_at_most(request, kv, limits.max_chunk)
    if needed > num_usable:
        num_registered = kv.pool.num_usable - num_usable
        registered = f" (registered prefixes hold {num_registered} more)" if num_registered else ""
        raise PromptTooLongError(
            f"the request needs up to {needed} KV blocks ({request.num_prompt_tokens} prompt tokens, max_tokens="
            f"{request.max_tokens}, {name}={n}), and the KV cache has {num_usable}{registered}; lower max_tokens or "
            f"{name}, or give the KV cache more memory",
            param="max_tokens",
        )


def blocks_at_most(request: Request, kv: KVCacheManager, max_chunk: int) -> int:
    """Upper bound of the blocks that a request can hold, without those of a registered prefix that it always shares."""
    n = request.params.num_sequences
    # The last sampled token needs no KV.
    total = request.num_prompt_tokens + request.max_tokens - 1
    if n == 1:
        needed = kv.most_blocks(total, max_chunk)
    else:
        needed = kv.groups.blocks_of_siblings(request.num_prompt_tokens, [total] * n, max_chunk)
    if request.bypass_prefix_cache:
        return needed
    chain = HashChain(kv.hash_block_size, request.cache_salt, request.extra_keys(kv.hash_block_size))
    return needed - kv.num_always_shared(chain, request.prompt_token_ids)


def has_room(num_blocks: int, room: int, kv: KVCacheManager, *, is_alone: bool) -> bool:
    """True if a request of `num_blocks` blocks may start in `room` blocks of the pool. Unless `is_alone` (nothing
    runs), a share WATERMARK stays free."""
    reserve = 0 if is_alone else int(WATERMARK * kv.num_unregistered_blocks)
    return num_blocks + reserve <= room


def blocks_in_use(request: Request, kv: KVCacheManager, max_chunk: int) -> int:
    """Pool blocks of a request when all its known tokens, and one more per sequence, are computed."""
    sequences = request.live_sequences
    # A beam slot without a beam still has its last beam's tokens: count it like the first beam.
    known = [len((sequences[0] if request.beam_search else sequence).token_ids) for sequence in sequences]
    # One token more than known each, within the bound of `reject_impossible`.
    lengths = [min(length + 1, sequences[0].max_total_tokens - 1) for length in known]
    if len(lengths) == 1:
        return kv.most_blocks(lengths[0], max_chunk)
    return kv.groups.blocks_of_siblings(num_shared_tokens(request), lengths, max_chunk)


class PrefixRegistration:
    """Checks new prefixes, and reserves blocks from a prefix's acceptance to its registration. The blocks stay free for
    it until its prompt is computed."""

    def __init__(self, kv: KVCacheManager, max_chunk: int) -> None:
        self._kv = kv
        self._max_chunk = max_chunk
        self._reserved: dict[str, int] = {}

    @property
    def num_usable(self) -> int:
        """Number of blocks that registered prefixes neither hold nor reserve."""
        return self._kv.num_unregistered_blocks - sum(self._reserved.values())

    def longest_sequence(self, limit: int) -> int:
        lengths = range(1, limit + 1)
        return bisect.bisect_right(lengths, self.num_usable, key=lambda n: self._kv.most_blocks(n, self._max_chunk))

    def reserve(self, prefix: Request, others: Iterable[Request]) -> None:
        """Reserve a new prefix's blocks. Raises UserError when it does not fit beside `others`, all unfinished
        requests."""
        kv, num_reserved = self._kv, blocks_at_most(prefix, self._kv, self._max_chunk)
        if not kv.enable_prefix_caching:
            raise UserError("a registered prefix needs enable_prefix_caching=True", param="enable_prefix_caching")
        if kv.is_registered(prefix.request_id):
            raise UserError(f"a prefix {prefix.request_id!r} is registered already", param="request_id")
        left = self.num_usable - num_reserved
        # The smallest request with the prefix computes one token and generates one.
        num_tokens = prefix.num_prompt_tokens
        behind = kv.most_blocks(num_tokens + 1, self._max_chunk) - kv.groups.num_kept_blocks(num_tokens)
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
        self._reserved[prefix.request_id] = num_reserved

    def release(self, prefix: Request) -> None:
        """Drop the reservation of a prefix that is registered or has ended."""
        del self._reserved[prefix.request_id]
