"""Request state: a slot (one row of every column) for each live sequence. Batches are gathered from these rows; plans
bring only differences."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import compress

import numpy as np

from quire.sampling.parameters import SamplingRows
from quire.step import SequenceFork, SequenceSampling, StepPlan
from quire.worker.block_tables import BlockTables
from quire.worker.platform.interface import RequestColumns


class RequestState:
    """State of all sequences with a request slot (row). lengths: tokens of each, including one that a step in progress
    will sample. num_prompt_tokens: [num_rows] int64, see NewSequence. tables, sampling: block tables and sampling
    parameters on the host. columns: read by kernels. rows_version: version of the last result of `rows_of`."""

    def __init__(self, tables: BlockTables, sampling: SamplingRows, columns: RequestColumns) -> None:
        num_rows = tables.num_rows
        self.lengths: dict[int, int] = {}
        self.num_prompt_tokens = np.zeros(num_rows, np.int64)
        self.tables = tables
        self.sampling = sampling
        self.columns = columns
        self._row_of: dict[int, int] = {}
        self._free = list(range(num_rows))
        self._asked: list[int] | None = None
        self._rows = np.zeros(0, np.int64)
        """Rows of the sequences last asked for."""
        self.rows_version = 0
        self.drafted: set[int] = set()
        """Sequences that had drafts, until a plan knows their token counts."""

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._row_of

    def row_of(self, seq_id: int) -> int:
        return self._row_of[seq_id]

    def rows_of(self, seq_ids: Sequence[int]) -> np.ndarray:
        """Request slots of sequences, [len(seq_ids)] int64. `rows_version` stays for the same sequences as in the last
        call."""
        if self._asked != seq_ids:
            self._rows = np.fromiter(map(self._row_of.__getitem__, seq_ids), np.int64, len(seq_ids))
            self._asked = list(seq_ids)
            self.rows_version += 1
        return self._rows

    def has_drafts(self, plan: StepPlan) -> bool:
        """True if a plan has drafts, or sequences with fewer tokens than it says, because drafts were rejected. Call
        once per plan, after `update`."""
        if plan.num_drafts:
            self.drafted.update(compress(plan.seq_ids, plan.num_drafts))
            return True
        if not self.drafted:
            return False
        behind, lengths = False, self.lengths
        for seq_id, start, count in zip(plan.seq_ids, plan.start_positions, plan.num_tokens, strict=True):
            if start + count > lengths[seq_id]:
                behind = True
            else:
                self.drafted.discard(seq_id)
        return behind

    def add_request(
        self, seq_id: int, token_ids: Sequence[int], num_prompt_tokens: int, sampling: SequenceSampling
    ) -> int:
        """Give a new sequence a row with `token_ids`; returns the row."""
        row = self._take_row(seq_id, sampling)
        self._set_tokens(seq_id, row, token_ids)
        self.num_prompt_tokens[row] = num_prompt_tokens
        return row

    def release(self, seq_id: int) -> int:
        """Free a sequence's row; returns the row. At its end or preemption."""
        row = self._row_of.pop(seq_id)
        self._asked = None
        self.columns.end_text(row, self.lengths.pop(seq_id, 0))
        self.drafted.discard(seq_id)
        heapq.heappush(self._free, row)
        self.tables.clear(row)
        self.sampling.clear(row)
        return row

    def append_blocks(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Append blocks to a row's tables. block_ids: per group."""
        for group, (start, entries) in enumerate(self.tables.append(row, block_ids)):
            self.columns.write_blocks(row, group, start, entries)

    def update(self, plan: StepPlan) -> None:
        """Apply a plan's changes, forks included."""
        for seq_id, position, token_ids in plan.sampled:
            self.columns.write_tokens(self._row_of[seq_id], position, token_ids)
            self.lengths[seq_id] = position + len(token_ids)
        for seq_id in plan.released:
            self.release(seq_id)
        for seq_id, kept in plan.trimmed_tables.items():
            self.tables.trim(self._row_of[seq_id], kept)
        for new in plan.new_sequences:
            row = self.add_request(new.seq_id, new.token_ids, new.num_prompt_tokens, new.sampling)
            self.columns.begin_text(row, len(new.token_ids), new.text_scope, new.prediction)
            self.append_blocks(row, new.block_ids)
            self.columns.write_values(row, new.columns, new.token_columns)
        for child in (*plan.beam_reorders, *plan.forks):
            self._add_child(child)
        for child in plan.beam_reorders:
            self._copy_parent(child, {})
        for seq_id, token_id in plan.token_overrides:
            self.columns.write_tokens(self._row_of[seq_id], self.lengths[seq_id] - 1, [token_id])
        for seq_id, token_ids in plan.appended.items():
            self.columns.write_tokens(self._row_of[seq_id], self.lengths[seq_id], token_ids)
            self.lengths[seq_id] += len(token_ids)
        for seq_id, block_ids in plan.new_blocks.items():
            self.append_blocks(self._row_of[seq_id], block_ids)
        for seq_id, group, logical_index, block_id in plan.replaced_blocks:
            row = self._row_of[seq_id]
            self.columns.write_blocks(row, group, *self.tables.replace(row, group, logical_index, block_id))
        if plan.forks:
            sampled_at = dict(zip(plan.sample_seq_ids, plan.sampled_positions, strict=True))
            for fork in plan.forks:
                self._copy_parent(fork, sampled_at)

    def _take_row(self, seq_id: int, sampling: SequenceSampling) -> int:
        assert seq_id not in self._row_of, f"sequence {seq_id} has a row already"
        assert self._free, f"no free row for sequence {seq_id}: {len(self._row_of)} sequences are live"
        row = self._row_of[seq_id] = heapq.heappop(self._free)
        self._asked = None
        self.sampling.set(row, sampling)
        self.columns.write_sampling(row)
        return row

    def _add_child(self, fork: SequenceFork) -> None:
        row = self._take_row(fork.child, fork.sampling)
        if fork.token_ids is not None:
            self._set_tokens(fork.child, row, fork.token_ids)

    def _copy_parent(self, fork: SequenceFork, sampled_at: Mapping[int, int]) -> None:
        """Copy the parent's tokens: up to the sampled position if the child is sampled in this step, else all; none if
        it brought its history."""
        parent, child = self._row_of[fork.parent], self._row_of[fork.child]
        self.num_prompt_tokens[child] = self.num_prompt_tokens[parent]
        if fork.token_ids is None:
            length = self.lengths[fork.child] = sampled_at.get(fork.child, self.lengths[fork.parent])
            self.columns.copy_tokens(parent, child, length)
        self.columns.copy_text(parent, child, self.lengths[fork.child])
        self.columns.copy_values(parent, child)
        self.tables.copy(parent, child)
        for group, count in enumerate(self.tables.num_entries(parent)):
            self.columns.copy_blocks(parent, child, group, count)

    def _set_tokens(self, seq_id: int, row: int, token_ids: Sequence[int]) -> None:
        self.lengths[seq_id] = len(token_ids)
        self.columns.write_tokens(row, 0, token_ids)
