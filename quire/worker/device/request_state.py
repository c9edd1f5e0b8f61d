"""The host's part of the device's request state: the slot, length and block table of each live sequence.

Token ids are kept on the device only. Every change is also recorded as a staged write for the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.step import NewSequence, SequenceFork, SequenceSampling, StepPlan
from quire.worker.block_tables import BlockTables
from quire.worker.device.state_arena import StateArena
from quire.worker.device.upload import RowWrites
from quire.worker.row_index import RowIndex

if TYPE_CHECKING:
    from quire.sampling.parameters import SamplingRows


class DeviceRequestState:
    """lengths: [num_rows] int64, tokens in the row, those counted that an enqueued step will sample.
    num_prompt_tokens: [num_rows] int64. tables: the host's copy of the block tables. sampling: the sampler's rows.
    """

    def __init__(self, arena: StateArena, tables: BlockTables, sampling: SamplingRows) -> None:
        num_rows = len(arena.token_ids)
        self.lengths = np.zeros(num_rows, np.int64)
        self.num_prompt_tokens = np.zeros(num_rows, np.int64)
        self.tables = tables
        self.sampling = sampling
        self._arena = arena
        self._index = RowIndex(num_rows)

    def __len__(self) -> int:
        return len(self._index)

    def rows_of(self, seq_ids: Sequence[int]) -> np.ndarray:
        """[len(seq_ids)] int64."""
        return self._index.rows_of(seq_ids)

    def update(self, plan: StepPlan, writes: RowWrites) -> None:
        """Apply a plan's changes of the request state, its forks included.

        Forks may be copied before the forward pass although they take effect after it: a child's slot was free, and the
        pass does not change what is copied. Independent writes come first, so that they share one round.
        """
        for seq_id in plan.released:
            self._release(seq_id)
        for new in plan.new_sequences:
            self._add(new, writes)
        for child in (*plan.beam_reorders, *plan.forks):
            self._add_child(child, writes)
        for branch in plan.beam_reorders:
            self._copy_parent(branch, {}, writes)
        for seq_id, token_id in plan.token_overrides:
            row = self._index.row_of(seq_id)
            writes.write(self._arena.token_offset(row, int(self.lengths[row]) - 1), np.array([token_id], np.int32))
        for seq_id, block_ids in plan.new_blocks.items():
            self._append_blocks(self._index.row_of(seq_id), block_ids, writes)
        for seq_id, group, logical_index, block_id in plan.replaced_blocks:
            row = self._index.row_of(seq_id)
            self.tables.replace(row, group, logical_index, block_id)
            writes.write(self._arena.block_offset(row, group, logical_index), np.array([block_id], np.int32))
        if plan.forks:
            sampled_at = sampled_positions(plan)
            for fork in plan.forks:
                self._copy_parent(fork, sampled_at, writes)

    def _release(self, seq_id: int) -> None:
        row = self._index.release(seq_id)
        self.tables.clear(row)
        self.sampling.clear(row)

    def _add(self, new: NewSequence, writes: RowWrites) -> None:
        row = self._index.take(new.seq_id)
        self._set_tokens(row, new.token_ids, writes)
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self._set_sampling(row, new.sampling, writes)
        self._append_blocks(row, new.block_ids, writes)

    def _add_child(self, fork: SequenceFork, writes: RowWrites) -> None:
        """Give a child a row, with what does not come from its parent."""
        row = self._index.take(fork.child)
        self._set_sampling(row, fork.sampling, writes)
        if fork.token_ids is not None:
            self._set_tokens(row, fork.token_ids, writes)

    def _copy_parent(self, fork: SequenceFork, sampled_at: Mapping[int, int], writes: RowWrites) -> None:
        """A child that is sampled in this step has its parent's tokens up to that position; a child with a history
        brought its tokens along; any other child has all tokens of its parent."""
        arena, tables = self._arena, self.tables
        parent, child = self._index.row_of(fork.parent), self._index.row_of(fork.child)
        self.num_prompt_tokens[child] = self.num_prompt_tokens[parent]
        if fork.token_ids is None:
            length = sampled_at.get(fork.child, int(self.lengths[parent]))
            self.lengths[child] = length
            writes.copy(arena.token_offset(parent), arena.token_offset(child), length)
        tables.copy(parent, child)
        for group, count in enumerate(tables.num_blocks(parent)):
            writes.copy(arena.block_offset(parent, group), arena.block_offset(child, group), count)

    def _set_sampling(self, row: int, sampling: SequenceSampling, writes: RowWrites) -> None:
        self.sampling.set(row, sampling)
        writes.write(self._arena.parameters_offset(row), self.sampling.words(row))

    def _set_tokens(self, row: int, token_ids: Sequence[int], writes: RowWrites) -> None:
        self.lengths[row] = len(token_ids)
        writes.write(self._arena.token_offset(row), np.array(token_ids, np.int32))

    def _append_blocks(self, row: int, block_ids: Sequence[Sequence[int]], writes: RowWrites) -> None:
        for group, (start, new) in enumerate(zip(self.tables.append(row, block_ids), block_ids, strict=True)):
            writes.write(self._arena.block_offset(row, group, start), new)


def sampled_positions(plan: StepPlan) -> dict[int, int]:
    """Sequence -> position of the token that this plan samples for it."""
    ends = (plan.start_positions[index] + plan.num_tokens[index] for index in plan.sample_from)
    return dict(zip(plan.sample_seq_ids, ends, strict=True))
