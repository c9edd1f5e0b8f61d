"""A snapshot of the KV cache on request: the state of every block and the block tables of every live sequence.

Plain data for the live page, `quire top` and `GET /debug/kv` (docs/live-view.md). Taking it is linear in blocks and
table entries, and nothing is kept for it from one time to the next.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from quire.decoding.sequence import PENDING_PREFIX, Request, Sequence
from quire.kv_cache.block_table import BlockTable
from quire.kv_cache.manager import KVCacheManager
from quire.kv_cache.registered_prefixes import RegisteredPrefix


class SequenceView(msgspec.Struct):
    """One live sequence and its block tables."""

    index: int
    """Which completion of the request: 0 .. n - 1."""
    num_output_tokens: int
    num_stored_tokens: int
    """Tokens whose keys and values are in the cache, those of plans in flight included."""
    num_filled_slots: int
    """Slots of the last block that hold a token, in the first KV group; 0 without blocks."""
    tables: list[list[int]]
    """Per KV group: logical index -> physical block, 0 where a sliding window has passed. Empty lists while the
    sequence has no blocks: it waits, or its prompt is still being computed by its first sibling."""
    host_tables: list[list[int]]
    """The same for the host pool, while the sequence is swapped out; empty otherwise."""


class RequestView(msgspec.Struct):
    """One live request."""

    request_id: str
    status: str
    """`running`, `waiting`, `preempted` (computes again) or `swapped` (its blocks are in the host pool);
    `pinned`: no request, but a registered prefix of that id, which holds its blocks."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache when it first started."""
    num_preemptions: int
    num_image_tokens: int
    """Prompt tokens that stand for images."""
    waits_for_prefix: bool
    """Another request computes a prefix that this one will share; it starts when that is there."""
    sequences: list[SequenceView]


class KVSnapshot(msgspec.Struct):
    """The whole KV cache at one moment between two steps."""

    block_size: int
    """Tokens of a block; where KV groups have sizes of their own, their greatest common divisor."""
    block_sizes: list[int]
    """Per KV group: tokens of a block; of recurrent states, tokens from one snapshot to the next."""
    windows: list[int | None]
    """Per KV group: the sliding window of its layers in tokens, None for full attention."""
    states: bytes
    """Byte i is the state of physical block i: 0 free, 255 cached (no owner, its content can still be hit), any other
    value the number of its owners, at most 254. Block 0 is never handed out."""
    host_states: bytes
    """The same for the blocks of the host pool, which holds what is swapped out; one byte when there is none."""
    requests: list[RequestView]
    """Running ones in their order, then the queue in its order, then registered prefixes."""


def take_snapshot(kv: KVCacheManager, running: Iterable[Request], waiting: Iterable[Request]) -> KVSnapshot:
    """Copy what is to be shown. O(blocks + table entries)."""
    views = [_view_request(request, kv) for requests in (running, waiting) for request in requests]
    views += [_view_prefix(name, prefix, kv) for name, prefix in kv.registered_prefixes()]
    return KVSnapshot(
        block_size=kv.block_size,
        block_sizes=list(kv.groups.sizes),
        windows=list(kv.windows),
        states=kv.pool.states(),
        host_states=kv.host.blocks.states(),
        requests=views,
    )


def _view_prefix(name: str, prefix: RegisteredPrefix, kv: KVCacheManager) -> RequestView:
    tables = [list(table) for table in prefix.blocks.tables]
    num_filled_slots = _num_filled_slots(prefix.blocks, prefix.num_tokens, kv)
    sequence = SequenceView(0, 0, prefix.num_tokens, num_filled_slots, tables, [])
    return RequestView(name, "pinned", prefix.num_tokens, 0, 0, 0, waits_for_prefix=False, sequences=[sequence])


def _num_filled_slots(blocks: BlockTable, num_tokens: int, kv: KVCacheManager) -> int:
    return num_tokens - (len(blocks.tables[0]) - 1) * kv.groups.sizes[0]


def _view_request(request: Request, kv: KVCacheManager) -> RequestView:
    is_swapped = any(sequence.swapped is not None for sequence in request.live_sequences)
    return RequestView(
        request_id=request.request_id,
        status="swapped" if is_swapped else request.status.name.lower(),
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens or 0,
        num_preemptions=request.num_preemptions,
        num_image_tokens=sum(image.num_tokens for image in request.images),
        waits_for_prefix=request.deferral is not None and request.deferral.reason == PENDING_PREFIX,
        sequences=[_view_sequence(sequence, kv) for sequence in request.live_sequences],
    )


def _view_sequence(sequence: Sequence, kv: KVCacheManager) -> SequenceView:
    blocks, num_stored = sequence.blocks, sequence.num_computed_tokens
    tables: list[list[int]] = [[] for _ in kv.windows]
    num_filled_slots = 0
    if blocks is not None and blocks.capacity > 0:
        tables = [list(table) for table in blocks.tables]
        num_filled_slots = _num_filled_slots(blocks, num_stored, kv)
    return SequenceView(
        index=sequence.index,
        num_output_tokens=sequence.num_output_tokens,
        num_stored_tokens=num_stored,
        num_filled_slots=num_filled_slots,
        tables=tables,
        host_tables=[] if sequence.swapped is None else [list(table) for table in sequence.swapped.tables],
    )
