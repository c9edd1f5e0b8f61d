"""Inputs of a step on a CPU, gathered without a Python loop over sequences or tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from quire.attention.interface import AttentionBackend, AttentionBatch
from quire.attention.states import StateBackend
from quire.layers.batch import NO_COLUMNS, ForwardBatch
from quire.multimodal.positions import LAST_SEEN
from quire.step import StepPlan, TokenValues
from quire.worker.block_tables import BlockTables
from quire.worker.columns import NO_LISTS, ColumnValues
from quire.worker.drafts import HostDrafts, Placed
from quire.worker.finders import NO_FINDER, Finder
from quire.worker.input_batch import InputBatch

if TYPE_CHECKING:
    from quire.worker.request_state import RequestState


class CpuColumns:
    """RequestColumns on a CPU: data of each request slot. token_ids: [num_rows, max_model_len + 1] int32; unwritten
    parts take no physical memory."""

    def __init__(
        self, num_rows: int, max_model_len: int, values: ColumnValues, drafts: HostDrafts | None = None
    ) -> None:
        self.values = values
        self.drafts = drafts
        self.finder: Finder = NO_FINDER if drafts is None else drafts.finder
        self.token_ids = np.zeros((num_rows, max_model_len + 1), np.int32)

    def write_tokens(self, row: int, position: int, token_ids: Sequence[int]) -> None:
        self.token_ids[row, position : position + len(token_ids)] = token_ids
        self.finder.rewrite(row, position)

    def copy_tokens(self, source: int, destination: int, num_tokens: int) -> None:
        self.token_ids[destination, :num_tokens] = self.token_ids[source, :num_tokens]

    def begin_text(self, row: int, num_tokens: int, scope: str, prediction: Sequence[int]) -> None:
        self.finder.begin_text(row, num_tokens, scope, prediction)

    def copy_text(self, source: int, destination: int, num_tokens: int) -> None:
        self.finder.copy_text(source, destination, num_tokens)

    def end_text(self, row: int, num_tokens: int) -> None:
        self.finder.end_text(row, self.token_ids[row, :num_tokens])

    def write_blocks(self, row: int, group: int, start: int, entries: Sequence[int] | np.ndarray) -> None:
        """Does nothing: kernels read BlockTables."""

    def copy_blocks(self, source: int, destination: int, group: int, num_entries: int) -> None:
        """Does nothing: kernels read BlockTables."""

    def write_sampling(self, row: int) -> None:
        """Reset the row's drafts; kernels read SamplingRows."""
        if self.drafts is not None:
            self.drafts.forget(row)

    def write_values(self, row: int, values: Mapping[str, int], lists: Mapping[str, TokenValues] = NO_LISTS) -> None:
        self.values.set(row, values, lists)

    def copy_values(self, source: int, destination: int) -> None:
        self.values.copy(source, destination)
        if self.drafts is not None:
            self.drafts.copy(source, destination)

    def gather_again(self, batch: InputBatch) -> None:
        """Note that tokens of the last gathered batch have changed in the table."""

    def place_drafts(self, plan: StepPlan, requests: RequestState) -> Placed:
        assert self.drafts is not None, "the plan has drafts, and the engine makes none"
        return self.drafts.place(plan, requests)

    def input_batch(
        self, rows: np.ndarray, starts: Sequence[int], counts: Sequence[int], rows_version: int
    ) -> InputBatch:
        return InputBatch.of_plan(rows, starts, counts)


def prepare_inputs(
    batch: InputBatch, token_table: np.ndarray, tables: BlockTables
) -> tuple[torch.Tensor, AttentionBatch]:
    """Gather token ids, [T] int64, and the attention batch of at least one sequence. token_table: [num_rows, capacity]
    int32."""
    rows, positions, sequence_index = batch.rows, batch.starts, np.arange(len(batch.rows))
    if batch.num_tokens != len(rows):  # otherwise each sequence has one token: most steps are decodes
        positions, sequence_index = batch.positions, batch.sequence_index
        rows = rows[sequence_index]
    token_ids = token_table[rows, positions].astype(np.int64)
    gathered = list(zip(tables.shapes, tables.gather(batch.rows, int(batch.ends.max())), strict=True))
    with_slots = [(shape, table) for shape, table in gathered if shape.has_slots]
    slots = (shape.slots(table, sequence_index, positions) for shape, table in with_slots)
    attention = AttentionBatch(
        query_start=torch.from_numpy(batch.query_start),
        start_positions=torch.from_numpy(batch.starts),
        slot_positions=torch.from_numpy(positions),
        sequence_index=torch.from_numpy(sequence_index),
        block_tables=tuple(torch.from_numpy(table) for _, table in with_slots),
        slot_mapping=tuple(torch.from_numpy(slot) for slot in slots),
        state_tables=tuple(torch.from_numpy(table) for shape, table in gathered if not shape.has_slots),
    )
    return torch.from_numpy(token_ids), attention


class CacheBackends(NamedTuple):
    """A model's back ends of attention and of recurrent states on a CPU."""

    attention: AttentionBackend
    states: StateBackend

    def forward_batch(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        logits_rows: torch.Tensor | None = None,
        columns: Mapping[str, torch.Tensor] = NO_COLUMNS,
    ) -> ForwardBatch:
        """Input of a forward pass. token_ids: [T]. logits_rows, columns: see ForwardBatch."""
        last_seen = columns.get(LAST_SEEN)
        if last_seen is not None and bool((last_seen > batch.slot_positions).any()):
            batch = replace(batch, last_seen=last_seen)
        attention, states = self.attention.plan(batch), self.states.plan(batch)
        return ForwardBatch(token_ids, batch.slot_positions, attention, logits_rows, states, columns)


class StepInputs(Protocol):
    """Gathers a batch's inputs for a forward pass on a CPU, in NumPy or native code."""

    def forward_batch(self, batch: InputBatch, logits_rows: torch.Tensor | None) -> ForwardBatch:
        """Input of a forward pass over a batch of the columns, valid until the next call. logits_rows: see
        ForwardBatch."""
        ...


class PlainInputs(NamedTuple):
    """StepInputs gathered by NumPy, without the native kernels."""

    columns: CpuColumns
    tables: BlockTables
    backends: CacheBackends

    def forward_batch(self, batch: InputBatch, logits_rows: torch.Tensor | None) -> ForwardBatch:
        columns = self.columns
        token_ids, attention = prepare_inputs(batch, columns.token_ids, self.tables)
        return self.backends.forward_batch(token_ids, attention, logits_rows, columns.values.of_tokens(batch))
