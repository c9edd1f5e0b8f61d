"""Use of KV slots in the paper's terms (§3.1, Fig. 2), as docs/accounting.md defines them. Blocks that the KV connector
loads for a deferred request, or sends for an ended one, count as stored."""

from __future__ import annotations

from collections.abc import Iterable

from quire.decoding.sequence import Sequence
from quire.kv_cache.layout import NULL_BLOCK
from quire.kv_cache.manager import KVCacheManager
from quire.kv_cache.stats import EngineStats
from quire.scheduler.in_flight import InFlight
from quire.scheduler.plan_builder import PlanBuilder
from quire.step import StepPlan


def first_stats(kv: KVCacheManager) -> EngineStats:
    return EngineStats(
        block_size=kv.hash_block_size,
        block_bytes=kv.block_bytes,
        num_blocks=kv.pool.num_usable,
        num_host_blocks=kv.host.blocks.num_usable,
    )


def count_copies(stats: EngineStats, plan: StepPlan, builder: PlanBuilder, block_bytes: int) -> None:
    """Count a plan's copies of blocks on the device, and to and from the host."""
    stats.copied_blocks_total += len(plan.block_copies)
    stats.swapped_out_blocks_total += len(builder.swap_out)
    stats.swapped_in_blocks_total += len(builder.swap_in)
    stats.swapped_bytes_total += (len(builder.swap_out) + len(builder.swap_in)) * block_bytes


def describe_kv(
    stats: EngineStats, kv: KVCacheManager, running: Iterable[Sequence], in_flight: Iterable[InFlight]
) -> None:
    """Report the contents and transfers of the block pool, host pool and KV connector."""
    pool = kv.pool
    stats.num_used_blocks = pool.num_used
    stats.num_cached_blocks = pool.num_evictable
    stats.num_shared_blocks = pool.num_shared
    stats.num_registered_blocks = kv.num_registered_blocks
    stats.evictions_total = pool.num_evictions
    stats.num_logical_blocks = pool.num_references
    stats.num_wasted_slots = num_wasted_slots(running, kv)
    stats.num_reserved_slots = num_reserved_slots(in_flight, kv)
    stats.num_stored_tokens = kv.num_used_slots - stats.num_wasted_slots - stats.num_reserved_slots
    stats.num_used_host_blocks = kv.host.blocks.num_used
    kv.connector.report_stats(stats)


def num_wasted_slots(running: Iterable[Sequence], kv: KVCacheManager) -> int:
    """Slots without a token at the ends of last blocks, also of registered prefixes. O(running sequences and registered
    prefixes)."""
    wasted = alike = 0
    shared: dict[int, int] = {}
    uniform_size = kv.uniform_size
    for sequence in running:
        blocks = sequence.blocks
        assert blocks is not None, "a running sequence has blocks"
        if uniform_size and not blocks.tail_shared:
            alike += blocks.capacity - sequence.num_computed_tokens  # in every group
            continue
        for group, size in kv.token_groups:
            table = blocks.tables[group]
            slots = len(table) * size - sequence.num_computed_tokens
            if blocks.tail_shared and slots:
                shared[table[-1]] = slots
            else:
                wasted += slots
    return len(kv.token_groups) * alike + wasted + sum(shared.values()) + kv.num_registered_empty_slots


def num_reserved_slots(in_flight: Iterable[InFlight], kv: KVCacheManager) -> int:
    """Number of token slots whose tokens plans in flight compute. O(sequences of the plans; with forks or several
    plans, their tokens)."""
    flights = list(in_flight)
    if not flights:
        return 0
    if len(flights) == 1 and not flights[0].forked:
        # With one plan and no fork every token has its own slot. A sequence without blocks has ended or was preempted,
        # and no longer owns the slots that it writes to.
        columns = zip(flights[0].sequences, flights[0].plan.num_tokens, strict=True)
        return len(kv.token_groups) * sum([count for sequence, count in columns if sequence.blocks is not None])
    slots: dict[int, int] = {}
    for sequence, start in _first_starts(flights).items():
        if sequence.blocks is not None:
            for group, size in kv.token_groups:
                _add_slots(slots, sequence.blocks.tables[group], start, sequence.num_computed_tokens, size)
    return sum(slots.values())


def _first_starts(flights: Iterable[InFlight]) -> dict[Sequence, int]:
    starts: dict[Sequence, int] = {}
    parents: dict[Sequence, Sequence] = {}
    for flight in flights:
        step_id = flight.plan.step_id
        for sequence, count in zip(flight.sequences, flight.plan.num_tokens, strict=True):
            if step_id >= sequence.first_step_id:
                starts[sequence] = starts.get(sequence, sequence.num_computed_tokens) - count
        for parent, children in flight.forked:
            parents |= {child: parent for child in children if step_id >= child.first_step_id}
    for child, parent in parents.items():
        starts[child] = starts[parent]
    return starts


def _add_slots(slots: dict[int, int], table: list[int], start: int, end: int, block_size: int) -> None:
    for index in range(start // block_size, -(-end // block_size)):
        first = index * block_size
        count = min(end, first + block_size) - max(start, first)
        if table[index] != NULL_BLOCK:
            slots[table[index]] = count
