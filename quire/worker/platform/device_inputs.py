from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.attention.device_batch import DeviceBatch, HostColumns, TokenColumns
from quire.kernels.triton.rows import InputBuffers, RowTables, StepColumns, prepare_inputs
from quire.multimodal.positions import LAST_SEEN
from quire.worker.columns import ColumnValues
from quire.worker.input_batch import InputBatch
from quire.worker.platform.state_arena import StateArena
from quire.worker.platform.upload import Section, Upload


def add_columns(batch: InputBatch, upload: Upload, values: ColumnValues) -> list[Section]:
    """Add the batch to the upload; returns the places of StepColumns' fields, in order."""
    columns = (batch.rows, batch.starts, batch.query_start, *(values.listed.of_batch(batch) or ()))
    return [upload.add(column) for column in columns]


class DeviceInputs:
    """Static buffers for a step's model inputs at full capacity, whose addresses CUDA graphs rely on. A step uses their
    beginnings."""

    def __init__(
        self,
        arena: StateArena,
        block_size: int,
        max_seqs: int,
        max_tokens: int,
        names: Sequence[str] = (),
        tables: RowTables | None = None,
    ) -> None:
        """block_size: tokens of the kernels' blocks. max_seqs, max_tokens: maximum of a step, padding included. names:
        step columns in the order of the tables' rules. tables: places in the arena (None: those of the model)."""
        device = arena.words.device
        self._tables = arena.tables if tables is None else tables
        self._names = names
        self._arena = arena
        self._block_size = block_size
        self._buffers = InputBuffers(
            token_ids=torch.zeros(max_tokens, dtype=torch.int64, device=device),
            slot_positions=torch.zeros(max_tokens, dtype=torch.int64, device=device),
            slots=torch.full((len(arena.token_tables), max_tokens), -1, dtype=torch.int64, device=device),
            others=torch.zeros(len(names), max_tokens, dtype=torch.int64, device=device),
            rows=torch.zeros(max_seqs, dtype=torch.int32, device=device),
            query_start=torch.zeros(max_seqs + 1, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(max_seqs, dtype=torch.int32, device=device),
        )
        self._columns = TokenColumns(self._buffers.token_ids[:0])

    def prepare(
        self, batch: InputBatch, on_device: StepColumns, num_seqs: int, num_tokens: int
    ) -> tuple[DeviceBatch, TokenColumns]:
        """Enqueue the kernel that fills the buffers for a step; returns the batch and the model's token columns.
        num_seqs, num_tokens: with padding."""
        buffers = self._buffers
        prepare_inputs(
            self._arena.words,
            self._tables,
            on_device,
            buffers,
            batch.num_tokens,
            (num_seqs, num_tokens),
            self._block_size,
        )
        if on_device.listed is not None and on_device.values is not None:
            buffers.others.index_copy_(1, on_device.listed.long(), on_device.values.long())
        on_device_batch = DeviceBatch(
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            rows=buffers.rows[:num_seqs],
            query_start=buffers.query_start[: num_seqs + 1],
            seq_lens=buffers.seq_lens[:num_seqs],
            slot_positions=buffers.slot_positions[:num_tokens],
            slot_mapping=tuple(slots[:num_tokens] for slots in buffers.slots),
            block_tables=self._arena.token_tables,
            state_tables=self._arena.state_tables,
            host=HostColumns(batch.query_start, batch.starts, batch.num_drafts),
            last_seen=None if on_device.listed is None or batch.max_query_len == 1 else self._last_seen(num_tokens),
        )
        if len(self._columns.token_ids) != num_tokens:
            others = dict(zip(self._names, buffers.others[:, :num_tokens], strict=True))
            self._columns = TokenColumns(buffers.token_ids[:num_tokens], others)
        return on_device_batch, self._columns

    def _last_seen(self, num_tokens: int) -> torch.Tensor | None:
        if LAST_SEEN not in self._names:
            return None
        return self._buffers.others[self._names.index(LAST_SEEN), :num_tokens]

    def padding(self, num_seqs: int, num_tokens: int) -> tuple[DeviceBatch, TokenColumns]:
        """Same tensors for a padding-only batch, for graph capture."""
        none = np.zeros(0, np.int64)
        batch = InputBatch.of(none, none, none)
        empty = torch.zeros(1, dtype=torch.int32, device=self._arena.words.device)
        return self.prepare(batch, StepColumns(empty[:0], empty[:0], empty), num_seqs, num_tokens)
