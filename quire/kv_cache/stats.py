"""Counters and gauges of the engine core, and shares computed from them (docs/accounting.md)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import msgspec

_SIZES = ("block_size", "block_bytes")
POSITIONS = "accepted_drafts_by_position"
NAMES = ("running_adapters", "waiting_adapters")


class Load(NamedTuple):
    """The few statistics (requests, blocks) that take constant time, with EngineStats' fields, for callers that read
    them after every step."""

    num_running: int
    num_waiting: int
    num_used_blocks: int
    preemptions_total: int


class EngineStats(msgspec.Struct, kw_only=True):
    """Snapshot of the counters and gauges. Fields that end in `_total` only grow; the others are the present state.
    Taken by `Scheduler.stats` for /metrics, live view and logs."""

    block_size: int = 0
    """Tokens for which a block has slots."""
    block_bytes: int = 0
    """Bytes of a block over all its layers, on one rank."""
    num_blocks: int = 0
    num_used_blocks: int = 0
    """Blocks that a live sequence or registered prefix refers to."""
    num_cached_blocks: int = 0
    """Free blocks whose content can still be hit (evictable)."""
    num_shared_blocks: int = 0
    """Blocks with more than one owner."""
    num_registered_blocks: int = 0
    """Blocks of registered prefixes; they count as used."""
    num_logical_blocks: int = 0
    """Entries of all block tables."""
    num_stored_tokens: int = 0
    """Slots of used blocks with a token's keys and values; shared ones count once, every KV group counts."""
    num_reserved_slots: int = 0
    """Slots of used blocks whose tokens steps in flight compute."""
    num_wasted_slots: int = 0
    """Slots of used blocks without a token, at the ends of last blocks."""
    num_host_blocks: int = 0
    num_used_host_blocks: int = 0
    num_running: int = 0
    num_running_in_background: int = 0
    """Running lines of batches."""
    num_waiting: int = 0
    """Waiting requests, preempted ones included."""
    num_deferred: int = 0
    """Waiting requests that a gate held back in the last pass; others wait for slots, blocks or tokens."""
    num_preempted: int = 0
    num_swapped: int = 0
    """Preempted requests with blocks in the host pool."""
    steps_total: int = 0
    scheduled_tokens_total: int = 0
    prompt_tokens_total: int = 0
    """Prompt tokens of started requests, prefix hits included."""
    generation_tokens_total: int = 0
    drafts_total: int = 0
    """Sequences with drafts, summed over steps."""
    draft_tokens_total: int = 0
    """Drafts that steps computed (`speculative_config`)."""
    accepted_draft_tokens_total: int = 0
    accepted_drafts_by_position: list[int] = []
    """Accepted drafts by place after the known token; as long as the most drafts of a step so far."""
    preemptions_total: int = 0
    swap_preemptions_total: int = 0
    swapped_out_blocks_total: int = 0
    swapped_in_blocks_total: int = 0
    """Blocks copied back, without those that the prefix cache still had."""
    swapped_bytes_total: int = 0
    """Bytes of both copies."""
    recomputed_tokens_total: int = 0
    num_offloaded_blocks: int = 0
    """Blocks on disk that this engine can use."""
    offload_bytes: int = 0
    """Known bytes in `kv_offload_dir`, files of other models and engines included."""
    host_cache_hit_blocks_total: int = 0
    disk_cache_hit_blocks_total: int = 0
    offload_stored_blocks_total: int = 0
    offload_stored_bytes_total: int = 0
    offload_store_failures_total: int = 0
    offload_loaded_blocks_total: int = 0
    """Blocks read from disk and found whole."""
    offload_loaded_bytes_total: int = 0
    offload_load_failures_total: int = 0
    """Blocks missing on disk, corrupt or unreadable, and computed instead."""
    prefix_cache_queries_total: int = 0
    prefix_cache_hits_total: int = 0
    prefix_cache_waits_total: int = 0
    """Times that a request waited for a running one to compute a shared prefix."""
    evictions_total: int = 0
    copied_blocks_total: int = 0
    finished_requests_total: int = 0
    timed_out_requests_total: int = 0
    max_running_adapters: int = 0
    """Limit of adapters whose requests run at a time."""
    num_adapter_slots: int = 0
    """Adapters that the workers may hold."""
    num_loaded_adapters: int = 0
    adapter_loads_total: int = 0
    running_adapters: list[str] = []
    waiting_adapters: list[str] = []
    max_encoder_tokens: int = 0
    """Limit of `num_encoder_tokens`, unless one image has more; 0: no images."""
    num_encoder_tokens: int = 0
    """Tokens of images whose features the workers keep."""
    encoded_images_total: int = 0
    """Images whose encoding has begun."""
    encoder_seconds_total: float = 0.0
    """Seconds that the first worker has encoded images."""
    expert_counts: dict[int, list[int]] | None = None
    """Layer with experts -> rows that each expert has computed since the start (option `expert_counts`, call `stats`),
    once for all ranks."""
    expert_ranks: dict[int, list[list[int]]] | None = None
    """Layer with experts -> experts on each rank now (option `enable_eplb`, call `stats`)."""


def add_up(snapshots: Sequence[EngineStats]) -> EngineStats:
    if len(snapshots) == 1:
        return snapshots[0]
    total = EngineStats()
    for name in EngineStats.__struct_fields__:
        values = [getattr(each, name) for each in snapshots]
        if name == "expert_counts":
            total.expert_counts = _add_up_counts([each for each in values if each is not None])
            continue
        if name == "expert_ranks":
            total.expert_ranks = next((each for each in values if each is not None), None)
            continue
        if name in NAMES:
            setattr(total, name, list(dict.fromkeys(chain.from_iterable(values))))
            continue
        if name == POSITIONS:
            total.accepted_drafts_by_position = _add_up_positions(values)
            continue
        setattr(total, name, max(values) if name in _SIZES else sum(values))
    return total


def _add_up_positions(counts: Sequence[list[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def _add_up_counts(counts: Sequence[dict[int, list[int]]]) -> dict[int, list[int]] | None:
    if not counts:
        return None
    return {
        layer: [sum(column) for column in zip(*(each[layer] for each in counts), strict=True)] for layer in counts[0]
    }


def carry_over(before: EngineStats | None, stats: EngineStats) -> EngineStats:
    """Snapshot of a new engine whose counters continue those of an ended one."""
    if before is None:
        return stats
    counters = (name for name in EngineStats.__struct_fields__ if name.endswith("_total"))
    sums: dict[str, Any] = {name: getattr(before, name) + getattr(stats, name) for name in counters}
    sums[POSITIONS] = _add_up_positions([before.accepted_drafts_by_position, stats.accepted_drafts_by_position])
    return msgspec.structs.replace(stats, **sums)


def shares(stats: EngineStats) -> dict[str, float]:
    """Shares computed from a snapshot, each from 0 to 1 (0 for an empty whole), as docs/accounting.md defines them.
    Those of stored, reserved and wasted slots add up to 1 when any block is in use."""
    used_slots = stats.num_stored_tokens + stats.num_reserved_slots + stats.num_wasted_slots
    return {
        "kv_cache_usage": _share(stats.num_used_blocks, stats.num_blocks),
        "kv_cache_stored": _share(stats.num_stored_tokens, used_slots),
        "kv_cache_reserved": _share(stats.num_reserved_slots, used_slots),
        "kv_cache_waste": _share(stats.num_wasted_slots, used_slots),
        "kv_cache_sharing": _share(stats.num_logical_blocks - stats.num_used_blocks, stats.num_logical_blocks),
        "prefix_cache_hit_rate": _share(stats.prefix_cache_hits_total, stats.prefix_cache_queries_total),
    }


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
