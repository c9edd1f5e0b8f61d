"""Attention over a DeviceBatch in plain torch, without asking the device for a value: what graphs may record."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.attention.device_batch import DeviceBatch
from quire.kernels.arguments import HeadWeights
from quire.kernels.rotation import Rotation


class TwinBackend:
    """keys, values: [num_layers, num_slots + 1, num_kv_heads, head_dim]; the last slot takes what padding would write.
    One KV group."""

    def __init__(self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> None:
        shape = (num_layers, num_blocks * block_size + 1, num_kv_heads, head_dim)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)
        self.block_size = block_size
        self.planned: list[DeviceBatch] = []

    def plan(self, batch: DeviceBatch) -> TwinStep:
        self.planned.append(batch)
        return TwinStep(self, batch)


@dataclass
class TwinStep:
    backend: TwinBackend
    batch: DeviceBatch

    def attend(
        self, heads: HeadWeights, qkv: torch.Tensor, rotation: Rotation | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        batch, backend, shape = self.batch, self.backend, heads.shape
        keys, values = backend.keys[shape.layer], backend.values[shape.layer]
        num_heads, num_kv_heads = shape.num_heads, shape.num_kv_heads
        split = qkv.view(-1, num_heads + 2 * num_kv_heads, shape.head_dim)
        turned, value = split.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if rotation is not None:
            turned = rotation.apply(turned)
        query, key = turned.split((num_heads, num_kv_heads), dim=1)
        (slots,) = batch.slot_mapping
        written = torch.where(slots < 0, keys.shape[0] - 1, slots)
        keys.index_copy_(0, written, key)
        values.index_copy_(0, written, value)

        (tables,) = batch.block_tables
        tokens = torch.arange(batch.num_tokens)
        sequence = torch.searchsorted(batch.query_start[1:].contiguous(), tokens, right=True)
        sequence = sequence.clamp(max=batch.num_seqs - 1)
        blocks = tables[batch.rows.long()][sequence].long()
        where = (blocks[:, :, None] * backend.block_size + torch.arange(backend.block_size)).flatten(1)
        repeats = num_heads // num_kv_heads
        seen_keys = keys[where].repeat_interleave(repeats, dim=2)
        seen_values = values[where].repeat_interleave(repeats, dim=2)
        scores = torch.einsum("thd,tlhd->thl", query, seen_keys) * shape.scale
        hidden = torch.arange(where.shape[1])[None, :] > batch.slot_positions[:, None]
        weights = scores.masked_fill(hidden[:, None, :], float("-inf")).softmax(-1)
        # A key that is not seen may be anything, NaN too.
        seen_values = seen_values.masked_fill(hidden[:, :, None, None], 0.0)
        attended = torch.einsum("thl,tlhd->thd", weights, seen_values).flatten(1)
        if out is None:
            return attended
        out.copy_(attended)
        return out
