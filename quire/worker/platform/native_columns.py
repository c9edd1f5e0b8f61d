"""Request state for native kernels: one native call gathers a step and plans its attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.attention.interface import AttentionBatch
from quire.attention.native_backend import NativeAttention, NativeAttentionStep
from quire.kernels.cpu import _native
from quire.kernels.cpu.runtime import NativeRuntime
from quire.layers.batch import ForwardBatch
from quire.multimodal.positions import LAST_SEEN
from quire.worker.block_tables import BlockTables
from quire.worker.columns import ColumnValues
from quire.worker.drafts import HostDrafts
from quire.worker.input_batch import InputBatch
from quire.worker.platform.cpu_inputs import CacheBackends, CpuColumns

FIRST_CAPACITY = 256
"""Initial capacity in tokens of a step."""


class NativeColumns(CpuColumns):
    """RequestColumns and StepInputs of the native CPU kernels, in the same memory each time and, for decodes of equal
    size, in the same objects. `PlainInputs` computes the same."""

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        values: ColumnValues,
        drafts: HostDrafts | None,
        tables: BlockTables,
        backends: CacheBackends,
        runtime: NativeRuntime,
    ) -> None:
        super().__init__(num_rows, max_model_len, values, drafts)
        self._runtime = runtime
        attention = backends.attention
        assert isinstance(attention, NativeAttention), "native kernels attend"
        self._shapes, self._attention, self._states = tables.shapes, attention, backends.states
        columns = [np.zeros(num_rows, np.int64) for _ in range(3)]
        self._starts, self._counts, self._ends = columns
        self._query_start = np.zeros(num_rows + 1, np.int64)
        self._tables = [np.zeros(table.shape, np.int32) for table in tables.arrays]  # reserved and not touched
        self._bound = tables.arrays  # kept alive, like the arrays above: the native object holds their addresses
        plans = iter(attention.plans)
        self._native = _native.StepInputs(
            runtime.pool,
            self.token_ids,
            tables.arrays,
            [shape.block_size for shape in tables.shapes],
            [next(plans) if shape.has_slots else None for shape in tables.shapes],
            self._tables,
            *columns,
            self._query_start,
            values.rules.tolist(),
            values.rows,
        )
        none = np.zeros(0, np.int64)
        self._batch = InputBatch.of(none, none, none)
        self._num_tokens = 0
        self._size = (-1, -1)
        self._reserve(FIRST_CAPACITY)

    def input_batch(
        self, rows: np.ndarray, starts: Sequence[int], counts: Sequence[int], rows_version: int
    ) -> InputBatch:
        """Gather a step's inputs; its batch reads all hidden states (`InputBatch.of`). Raises ValueError outside the
        tables or pool."""
        if self._batch.rows_version != rows_version or not rows_version:
            self._native.set_rows(rows)
            num_seqs = len(rows)
            starts_counts_ends = self._starts[:num_seqs], self._counts[:num_seqs], self._ends[:num_seqs]
            query_start = self._query_start[: num_seqs + 1]
            self._batch = InputBatch(rows, *starts_counts_ends, query_start, None, query_start, rows_version)
        self._num_tokens = sum(counts)
        if self._num_tokens > len(self._tokens[0]):
            self._reserve(self._num_tokens)
        self._gather(starts, counts)
        return self._batch

    def gather_again(self, batch: InputBatch) -> None:
        self._gather(batch.starts.tolist(), batch.counts.tolist())

    def _gather(self, starts: Sequence[int], counts: Sequence[int]) -> None:
        self._native.gather(starts, counts)
        if not self.values.names:
            return
        listed = self.values.listed.of_batch(self._batch)
        if listed is None:
            return
        columns = self._tokens[-len(self.values.names) :]
        for name, column, values in zip(self.values.names, columns, listed[1], strict=True):
            column[listed[0]] = values
            if name == LAST_SEEN:
                for plan in self._attention.plans:
                    plan.see_ahead(column.ctypes.data)

    def forward_batch(self, batch: InputBatch, logits_rows: torch.Tensor | None) -> ForwardBatch:
        """Input of a forward pass over the last gathered batch."""
        assert batch.rows_version == self._batch.rows_version, "another batch was gathered meanwhile"
        size = len(batch.rows), self._num_tokens
        if size != self._size or size[0] != size[1]:  # batches of equal size may divide their tokens differently
            self._size, self._forward_batch = size, self._view(*size)
        if logits_rows is None:
            return self._forward_batch
        return self._forward_batch._replace(logits_rows=logits_rows, version=0)

    def _view(self, num_seqs: int, num_tokens: int) -> ForwardBatch:
        """Input of a step of this size, with a new version (ForwardBatch.version)."""
        token_ids, positions, sequence_index, *slots = (torch.from_numpy(each[:num_tokens]) for each in self._tokens)
        names = self.values.names
        slots, others = slots[: len(slots) - len(names)], slots[len(slots) - len(names) :]
        tables = [torch.from_numpy(table[:num_seqs]) for table in self._tables]
        batch = AttentionBatch(
            query_start=torch.from_numpy(self._query_start[: num_seqs + 1]),
            start_positions=torch.from_numpy(self._starts[:num_seqs]),
            slot_positions=positions,
            sequence_index=sequence_index,
            block_tables=tuple(each for shape, each in zip(self._shapes, tables, strict=True) if shape.has_slots),
            slot_mapping=tuple(slots),
            state_tables=tuple(each for shape, each in zip(self._shapes, tables, strict=True) if not shape.has_slots),
        )
        step = NativeAttentionStep(self._attention, self._attention.plans, batch)
        columns = dict(zip(names, others, strict=True))
        states, version = self._states.plan(batch), self._runtime.next_version()
        return ForwardBatch(token_ids, positions, step, states=states, columns=columns, version=version)

    def _reserve(self, num_tokens: int) -> None:
        num_groups = sum(shape.has_slots for shape in self._shapes)
        capacity = 1 << (num_tokens - 1).bit_length()
        num_columns = 3 + num_groups + len(self.values.names)
        self._tokens = [np.zeros(capacity, np.int64) for _ in range(num_columns)]
        self._native.place_tokens(*self._tokens[:3], self._tokens[3 : 3 + num_groups], self._tokens[3 + num_groups :])
        self._size = (-1, -1)
