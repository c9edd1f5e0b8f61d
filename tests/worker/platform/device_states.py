"""A step's batch and states as a device has them, made of those of a host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.attention.device_batch import DeviceBatch, DeviceStateStep
from quire.attention.interface import AttentionBatch, StateStep
from quire.attention.states import StateBackend


def device_batch(batch: AttentionBatch) -> DeviceBatch:
    counts = batch.query_start.diff()
    lengths = batch.start_positions + counts
    return DeviceBatch(
        num_seqs=len(counts),
        num_tokens=len(batch.slot_positions),
        max_query_len=int(counts.max()),
        max_seq_len=int(lengths.max()),
        rows=torch.arange(len(counts), dtype=torch.int32),
        query_start=batch.query_start.int(),
        seq_lens=lengths.int(),
        slot_positions=batch.slot_positions,
        slot_mapping=batch.slot_mapping,
        block_tables=batch.block_tables,
        state_tables=batch.state_tables,
    )


@dataclass
class DeviceStatePlanner:
    """Plans a device's states for a batch of the host."""

    backend: StateBackend

    def plan(self, batch: AttentionBatch) -> DeviceStateStep | None:
        return self.backend.plan_on_device(device_batch(batch))


def on_device(states: StateStep, *, num_seqs: int, num_tokens: int) -> DeviceStateStep:
    """The same step with sequences and tokens of padding behind its own. Rows of tables lie in another order
    than the batch."""
    starts = torch.tensor(states.query_start)
    lengths = states.starts + starts.diff()
    count = len(lengths)
    batch = DeviceBatch(
        num_seqs=count + num_seqs,
        num_tokens=int(starts[-1]) + num_tokens,
        max_query_len=int(starts.diff().max()),
        max_seq_len=int(lengths.max()),
        rows=torch.cat((torch.arange(count - 1, -1, -1), torch.zeros(num_seqs, dtype=torch.int64))).int(),
        query_start=torch.cat((starts, starts[-1:].expand(num_seqs))).int(),
        seq_lens=torch.cat((lengths, torch.zeros(num_seqs, dtype=torch.int64))).int(),
        slot_positions=torch.zeros(int(starts[-1]) + num_tokens, dtype=torch.int64),
        slot_mapping=(),
        block_tables=(),
    )
    tables = {layer: table.flip(0).contiguous() for layer, table in states.tables.items()}
    return DeviceStateStep(batch, tables, states.interval, states.pages)
