"""SlotLedger: the accounts of KV memory by brute force, the plain twin of quire/scheduler/kv_usage.py.

It follows the plans as a worker would, and notes for each slot of each physical block the step that fills it. What is
stored, reserved, wasted and saved is then counted slot by slot over the blocks that the live tables name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import msgspec

from quire.kv_cache.layout import NULL_BLOCK
from quire.kv_cache.stats import EngineStats
from quire.scheduler.scheduler import Scheduler
from quire.step import StepPlan
from tests.fakes.remote import RemoteTransfers
from tests.fakes.transfers import copies, disk_orders

Tables = list[list[int]]


def numbers(stats: EngineStats) -> Counter[str]:
    """All of a snapshot that can be added up."""
    return Counter({name: value for name, value in msgspec.structs.asdict(stats).items() if isinstance(value, int)})


class SlotLedger:
    """`follow` every plan in order; `check` whenever you like."""

    _HOST = 2**32
    """Host blocks are numbered from here on."""

    def __init__(self, *block_sizes: int, states: Collection[int] = ()) -> None:
        """block_sizes: per KV group, or one of all groups. states: groups whose blocks have one slot each, which is
        always stored."""
        self._sizes = block_sizes
        self._states = states
        self._size = max(block_sizes)
        self._tables: dict[int, Tables] = {}
        """seq_id -> per group the physical blocks, as a worker knows them."""
        self.has_drafts = False
        """Set by the first plan with drafts: how many tokens such a step yields a plan does not say, so the slots are
        not compared any more; what is owned and shared is."""
        self._filled_by: dict[tuple[int, int], int] = {}
        """(block, offset) -> step that fills the slot."""

    def follow(self, plan: StepPlan) -> None:
        for seq_id in plan.released:
            del self._tables[seq_id]
        for seq_id, kept in plan.trimmed_tables.items():
            for table, num_blocks in zip(self._tables[seq_id], kept, strict=True):
                del table[num_blocks:]
        self.has_drafts |= bool(plan.num_drafts)
        for device, host in copies(plan).swap_out:
            self._copy(device, self._HOST + host)  # first of all: this plan may hand the block out again
        for _, _, host in disk_orders(plan).loads:
            self._filled_by |= {(self._HOST + host, offset): plan.step_id for offset in range(self._size)}
        if isinstance(plan.transfers, RemoteTransfers):
            for _, _, block in plan.transfers.loads:
                self._filled_by |= {(block, offset): -1 for offset in range(self._size)}  # stored: no plan computes it
        starts = dict(zip(plan.seq_ids, plan.start_positions, strict=True))
        for new in plan.new_sequences:
            self._tables[new.seq_id] = [list(table) for table in new.block_ids]
            if new.seq_id in starts:  # else it is swapped in, and runs later
                for group, table in enumerate(new.block_ids):
                    for block in table[starts[new.seq_id] // self._size_of(group) :]:
                        self._clear(block)
        for branch in plan.beam_reorders:
            self._tables[branch.child] = [list(table) for table in self._tables[branch.parent]]
        for host, device in copies(plan).swap_in:
            self._copy(self._HOST + host, device)
        for source, destination in plan.block_copies:
            self._copy(source, destination)
        for seq_id, groups in plan.new_blocks.items():
            for table, blocks in zip(self._tables[seq_id], groups, strict=True):
                table.extend(blocks)
                for block in blocks:
                    self._clear(block)
        for seq_id, group, index, block in plan.replaced_blocks:
            self._tables[seq_id][group][index] = block
        for seq_id, start, count in zip(plan.seq_ids, plan.start_positions, plan.num_tokens, strict=True):
            for group, table in enumerate(self._tables[seq_id]):
                if group in self._states:
                    continue
                size = self._size_of(group)
                for position in range(start, start + count):
                    self._filled_by[table[position // size], position % size] = plan.step_id
        for fork in plan.forks:
            self._tables[fork.child] = [list(table) for table in self._tables[fork.parent]]

    def check(self, scheduler: Scheduler) -> EngineStats:
        """Compare the scheduler's statistics with a count of every slot. Raises AssertionError."""
        handles = [sequence.blocks for sequence in scheduler._running.sequences]
        handles += [prefix.blocks for prefix in scheduler.kv._registered]
        owners = Counter(
            block
            for blocks in handles
            for table in blocks.tables  # type: ignore[union-attr]
            for block in table
            if block != NULL_BLOCK
        )
        group_of = {
            block: group
            for blocks in handles
            for group, table in enumerate(blocks.tables)  # type: ignore[union-attr]
            for block in table
        }
        sizes = {block: 1 if group in self._states else self._size_of(group) for block, group in group_of.items()}
        live = set(owners)
        scheduler.kv.transfer_blocks.check(owners)  # adds the blocks that transfers own
        sent = {block for blocks in scheduler.kv.transfer_blocks._sending.values() for block in blocks}
        stored = {(block, offset): -1 for block in sent - live for offset in range(self._size)}
        stored |= {(block, 0): -1 for block, group in group_of.items() if group in self._states}
        filled_by = self._filled_by | stored
        steps = [filled_by.get((b, offset)) for b in owners for offset in range(sizes.get(b, self._size))]
        in_flight = set(scheduler._in_flight)
        stats = scheduler.stats()
        assert stats.num_used_blocks == len(owners)
        assert stats.num_logical_blocks == owners.total()
        assert stats.num_shared_blocks == sum(count > 1 for count in owners.values())
        if self.has_drafts:
            slots = stats.num_stored_tokens, stats.num_reserved_slots, stats.num_wasted_slots
            assert min(slots) >= 0, slots
            assert sum(slots) == len(steps)
            return stats
        num_reserved = sum(step in in_flight for step in steps)
        counts = stats.num_wasted_slots, stats.num_reserved_slots, stats.num_stored_tokens
        expected = steps.count(None), num_reserved, len(steps) - steps.count(None) - num_reserved
        assert counts == expected, f"wasted, reserved, stored: {counts} instead of {expected}"
        return stats

    def _size_of(self, group: int) -> int:
        return self._sizes[group % len(self._sizes)]

    def _copy(self, source: int, destination: int) -> None:
        self._clear(destination)
        for offset in range(self._size):
            if (source, offset) in self._filled_by:
                self._filled_by[destination, offset] = self._filled_by[source, offset]

    def _clear(self, block: int) -> None:
        for offset in range(self._size):
            self._filled_by.pop((block, offset), None)
