"""The attention batch of one step on a device: the counterpart of AttentionBatch whose tensors stay on the device.

Sizes are the host's, so that grids are chosen without asking the device; everything else lies in tensors at addresses
that stay the same for the life of a CUDA graph. A batch may be padded to the size that a graph was captured for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from quire.attention.interface import StateStep


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """S sequences with T new tokens in all, concatenated in batch order, padding included.

    The first new token of sequence s is at position seq_lens[s] - (query_start[s + 1] - query_start[s]). Padding
    sequences come last and own no tokens; padding tokens come last and belong to no sequence. Padding rows may hold any
    values, finite or not: no kernel reads out of range or writes pages for them, and no real row depends on them.
    """

    num_seqs: int
    """S."""
    num_tokens: int
    """T."""
    max_query_len: int
    """No sequence has more new tokens. 1: token t is the one of sequence t, which the decode kernel relies on."""
    max_seq_len: int
    """No sequence is longer; bounds grids. In a graph: as long as any can become."""
    rows: torch.Tensor
    """[S] int32: the sequence's row in the block tables. Padding: 0."""
    query_start: torch.Tensor
    """[S + 1] int32: sequence s owns tokens query_start[s]:query_start[s + 1]. Padding: the number of real tokens."""
    seq_lens: torch.Tensor
    """[S] int32: tokens after this step. Padding: 0."""
    positions: torch.Tensor
    """[T] int64: position of each token in its sequence. Padding: 0."""
    slot_mapping: tuple[torch.Tensor, ...]
    """Per KV group that keeps tokens [T] int64: block * block_size + offset that the token's key and value are written
    to. Padding: -1, nothing is written."""
    block_tables: tuple[torch.Tensor, ...]
    """Per KV group that keeps tokens [num_rows, max_blocks] int32: the kernels' blocks in logical order, a row for
    every request that lives, persistent; kernels index it by `rows`."""
    state_tables: tuple[torch.Tensor, ...] = ()
    """Per KV group that keeps states [num_rows, max_blocks] int32: blocks in logical order, otherwise as
    `block_tables`."""


@dataclass(frozen=True, slots=True)
class DeviceStateStep:
    """Where the sequences of a device's step keep their states: the counterpart of StateStep, which says what is read
    and written. A padding sequence owns no tokens, reads nothing and writes nothing.

    tables: by layer, [num_rows, max_blocks] int32, persistent; kernels index it by `batch.rows`. interval: tokens of a
    block. pages: by layer, [num_blocks, page bytes] uint8, the pool.
    """

    batch: DeviceBatch
    tables: Mapping[int, torch.Tensor]
    interval: int
    pages: Mapping[int, torch.Tensor]

    def on_host(self) -> StateStep:
        """The same for operations without a kernel; waits for the device. Padding sequences are left out."""
        batch = self.batch
        query_start, lengths = batch.query_start.tolist(), batch.seq_lens.long()
        counts = batch.query_start.diff()
        num_seqs = int((counts > 0).sum())
        rows = batch.rows[:num_seqs].long()
        tables = {layer: table.index_select(0, rows) for layer, table in self.tables.items()}
        starts = lengths[:num_seqs] - counts[:num_seqs]
        return StateStep(query_start[: num_seqs + 1], starts, tables, self.interval, self.pages)


StepStates: TypeAlias = StateStep | DeviceStateStep
"""What a layer that keeps states is given of a step."""
