"""Counters and gauges of the engine core, sent to the front end as one snapshot."""

from __future__ import annotations

import msgspec


class EngineStats(msgspec.Struct, kw_only=True):
    """A snapshot. Fields that end in `_total` only grow; the others are the state now."""

    block_size: int = 0
    num_blocks: int = 0
    """Usable blocks of the pool."""
    num_used_blocks: int = 0
    """Blocks that a live sequence or a pinned prefix refers to."""
    num_cached_blocks: int = 0
    """Free blocks whose content can still be hit by a prefix (evictable)."""
    num_shared_blocks: int = 0
    """Blocks with more than one owner."""
    num_pinned_blocks: int = 0
    """Blocks of registered prefixes; they count as used."""
    num_stored_tokens: int = 0
    """Slots of used blocks that hold a token's keys and values; shared ones count once, every KV group counts."""
    num_host_blocks: int = 0
    """Blocks of the host pool, for swapped requests."""
    num_used_host_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0
    """Requests in the queue, preempted ones included."""
    num_preempted: int = 0
    num_swapped: int = 0
    """Those of the preempted requests whose blocks are in the host pool."""
    steps_total: int = 0
    scheduled_tokens_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    preemptions_total: int = 0
    swap_preemptions_total: int = 0
    """Those of the preemptions that swapped."""
    swapped_out_blocks_total: int = 0
    """Blocks copied to the host."""
    swapped_in_blocks_total: int = 0
    """Blocks copied back: fewer, where the prefix cache still had them or requests ended meanwhile."""
    swapped_bytes_total: int = 0
    """Bytes of both."""
    recomputed_tokens_total: int = 0
    num_offloaded_blocks: int = 0
    """Blocks on disk that this engine can use."""
    offload_bytes: int = 0
    """In `kv_offload_dir`, files of other models and engines included, as far as known."""
    host_cache_hit_blocks_total: int = 0
    """Blocks of prefix hits that came from host memory."""
    disk_cache_hit_blocks_total: int = 0
    """Blocks of prefix hits that came from disk."""
    offload_stored_blocks_total: int = 0
    """Blocks written to disk; not those that were there already."""
    offload_stored_bytes_total: int = 0
    offload_store_failures_total: int = 0
    offload_loaded_blocks_total: int = 0
    """Blocks read from disk and found whole."""
    offload_loaded_bytes_total: int = 0
    offload_load_failures_total: int = 0
    """Blocks that were gone from disk, damaged or unreadable, and were computed instead."""
    prefix_cache_queries_total: int = 0
    """Prompt tokens looked up."""
    prefix_cache_hits_total: int = 0
    """Prompt tokens found."""
    prefix_cache_waits_total: int = 0
    """Times that a request waited for a running one to compute the prefix they share."""
    evictions_total: int = 0
    """Cached blocks whose content was given up for a new owner."""
    copied_blocks_total: int = 0
    finished_requests_total: int = 0
    timed_out_requests_total: int = 0
    """Of those, how many ended by their time limit."""
