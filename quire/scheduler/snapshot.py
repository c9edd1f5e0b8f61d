"""Snapshot of the KV cache: every block's state and live sequence's block tables, for the live page, `quire top` and
`GET /debug/kv` (docs/live-view.md)."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from quire.decoding.sequence import PENDING_PREFIX, Request, Sequence
from quire.kv_cache.block_table import BlockTable
from quire.kv_cache.manager import KVCacheManager
from quire.kv_cache.registered_prefixes import RegisteredPrefix


class SequenceView(msgspec.Struct):
    index: int
    """Index of the completion, 0 .. n - 1."""
    num_output_tokens: int
    num_stored_tokens: int
    """Tokens with keys and values in the cache, those of plans in flight included."""
    num_filled_slots: int
    """Filled slots of the last block, in the first KV group; 0 without blocks."""
    tables: list[list[int]]
    """One list per KV group: logical index -> physical block, 0 where a sliding window has passed. Empty lists while
    the sequence waits, or its first sibling still computes its prompt."""
    host_tables: list[list[int]]
    """`tables` in the host pool while the sequence is swapped out; empty otherwise."""


class RequestView(msgspec.Struct):
    """One live request, or a registered prefix, in a KVSnapshot for the live view."""

    request_id: str
    status: str
    """`running`, `waiting`, `preempted` (computes again), `swapped` (its blocks are in the host pool), or `pinned` for
    a registered prefix, which holds its blocks."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens cached at its first start."""
    num_preemptions: int
    num_image_tokens: int
    """Prompt tokens that stand for images."""
    waits_for_prefix: bool
    """Another request computes a prefix that this one will share."""
    sequences: list[SequenceView]
    seconds: float = 0.0
    """Time since its arrival."""
    tokens_per_second: float = 0.0
    """Generated tokens of all sequences a second since its first step."""
    is_background: bool = False
    """A line of a batch: aborted, it is asked again."""


class KVSnapshot(msgspec.Struct):
    block_size: int
    """Tokens of a block; the greatest common divisor if KV groups have different sizes."""
    block_sizes: list[int]
    """Tokens of a block of each KV group; for recurrent states, tokens between snapshots."""
    windows: list[int | None]
    """Sliding window of each KV group's layers in tokens; None: full attention."""
    states: bytes
    """State of each physical block: 0 free, 255 cached (without owner, can still be hit), other values: number of
    owners, at most 254. Block 0 is never handed out."""
    host_states: bytes
    """`states` of the host pool's blocks; one byte when there is none."""
    requests: list[RequestView]
    """Running requests in order, then the queue in order, then registered prefixes."""


def take_snapshot(kv: KVCacheManager, running: Iterable[Request], waiting: Iterable[Request], now: float) -> KVSnapshot:
    views = [_view_request(request, kv, now) for requests in (running, waiting) for request in requests]
    views += [_view_prefix(name, prefix, kv) for name, prefix in kv.registered_prefixes()]
    return KVSnapshot(
        block_size=kv.hash_block_size,
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


def _view_request(request: Request, kv: KVCacheManager, now: float) -> RequestView:
    ran = 0.0 if request.first_scheduled_time is None else now - request.first_scheduled_time
    num_generated = sum(sequence.num_output_tokens for sequence in request.sequences)
    is_swapped = any(sequence.swapped is not None for sequence in request.live_sequences)
    return RequestView(
        request_id=request.request_id,
        status="swapped" if is_swapped else request.status.name.lower(),
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens or 0,
        num_preemptions=request.num_preemptions,
        num_image_tokens=sum(image.num_tokens for image in request.images),
        waits_for_prefix=request.deferral is not None and request.deferral.reason == PENDING_PREFIX,
        seconds=round(max(0.0, now - request.arrival_time), 1),
        tokens_per_second=round(num_generated / ran, 1) if ran > 0 else 0.0,
        is_background=request.is_background,
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
