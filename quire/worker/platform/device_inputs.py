"""The inputs of a step on the device: static buffers, filled by one kernel from the columns that the host sends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.attention.device_batch import DeviceBatch
from quire.kernels.triton.rows import InputBuffers, StepColumns, prepare_inputs
from quire.step import StepPlan
from quire.worker.platform.staged_rows import DeviceRequestState
from quire.worker.platform.state_arena import StateArena
from quire.worker.platform.upload import Section, Upload


@dataclass(frozen=True, slots=True)
class HostColumns:
    """S scheduled sequences in the plan's order. rows, starts, counts, ends: [S] int64. query_start: [S + 1] int64."""

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    ends: np.ndarray
    query_start: np.ndarray

    @property
    def num_tokens(self) -> int:
        return int(self.query_start[-1])

    @property
    def max_query_len(self) -> int:
        """Most tokens of one sequence in this step; of a batch that is nothing but padding: 1, like a decode's, for
        grids follow it and graphs are captured over such batches."""
        return int(self.counts.max(initial=1))

    @property
    def max_seq_len(self) -> int:
        """Tokens of the longest sequence after this step."""
        return int(self.ends.max(initial=0))


def host_columns(plan: StepPlan, requests: DeviceRequestState) -> HostColumns:
    """Every scheduled token must be known, or sampled by an earlier step."""
    rows = requests.rows_of(plan.seq_ids)
    starts = np.array(plan.start_positions, np.int64)
    counts = np.array(plan.num_tokens, np.int64)
    ends = starts + counts
    assert (ends <= requests.lengths[rows]).all(), "the plan schedules a token that no step has sampled"
    query_start = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=query_start[1:])
    return HostColumns(rows, starts, counts, ends, query_start)


@dataclass(frozen=True, slots=True)
class ColumnSections:
    """The columns of a step in its upload."""

    rows: Section
    starts: Section
    query_start: Section


def add_columns(columns: HostColumns, upload: Upload) -> ColumnSections:
    """Put what the device must know of the columns into the upload."""
    return ColumnSections(upload.add(columns.rows), upload.add(columns.starts), upload.add(columns.query_start))


class DeviceInputs:
    """The static buffers, at full capacity: addresses that stay the same for the life of a CUDA graph. A step uses
    their beginnings."""

    def __init__(self, arena: StateArena, block_size: int, max_seqs: int, max_tokens: int) -> None:
        """max_seqs, max_tokens: of a step, padding included."""
        device = arena.words.device
        self._arena = arena
        self._block_size = block_size
        self._buffers = InputBuffers(
            token_ids=torch.zeros(max_tokens, dtype=torch.int64, device=device),
            positions=torch.zeros(max_tokens, dtype=torch.int64, device=device),
            slots=torch.full((len(arena.block_tables), max_tokens), -1, dtype=torch.int64, device=device),
            rows=torch.zeros(max_seqs, dtype=torch.int32, device=device),
            query_start=torch.zeros(max_seqs + 1, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(max_seqs, dtype=torch.int32, device=device),
        )

    def prepare(
        self, columns: HostColumns, on_device: StepColumns, num_seqs: int, num_tokens: int
    ) -> tuple[DeviceBatch, torch.Tensor]:
        """Enqueue the kernel; returns the batch and its token ids, [T] int64. num_seqs, num_tokens: with padding."""
        buffers = self._buffers
        prepare_inputs(
            self._arena.words,
            self._arena.tables,
            on_device,
            buffers,
            columns.num_tokens,
            (num_seqs, num_tokens),
            self._block_size,
        )
        batch = DeviceBatch(
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            max_query_len=columns.max_query_len,
            max_seq_len=columns.max_seq_len,
            rows=buffers.rows[:num_seqs],
            query_start=buffers.query_start[: num_seqs + 1],
            seq_lens=buffers.seq_lens[:num_seqs],
            positions=buffers.positions[:num_tokens],
            slot_mapping=tuple(slots[:num_tokens] for slots in buffers.slots),
            block_tables=self._arena.block_tables,
        )
        return batch, buffers.token_ids[:num_tokens]

    def padding(self, num_seqs: int, num_tokens: int) -> tuple[DeviceBatch, torch.Tensor]:
        """The same tensors for a batch that is nothing but padding, to capture graphs with."""
        none = np.zeros(0, np.int64)
        columns = HostColumns(none, none, none, none, np.zeros(1, np.int64))
        empty = torch.zeros(1, dtype=torch.int32, device=self._arena.words.device)
        return self.prepare(columns, StepColumns(empty[:0], empty[:0], empty), num_seqs, num_tokens)
