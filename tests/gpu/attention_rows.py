"""One sequence through the batch-invariant attention back end: whole, in chunks, or one token at a time."""

from __future__ import annotations

import sys

import torch

from quire.attention.device_batch import DeviceBatch
from quire.attention.triton_backend import TritonAttention
from quire.kernels.arguments import HeadWeights, LayerAttention
from quire.kernels.triton.attention_tiles import DeviceLimits
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import AttentionSpec
from tests.kernels.triton.helpers import random

BLOCK_SIZE = 16


def limits_of(device: torch.device) -> DeviceLimits:
    if device.type != "cuda":
        return DeviceLimits()
    properties = torch.cuda.get_device_properties(device)
    return DeviceLimits((properties.major, properties.minor), properties.multi_processor_count)


class Sequence:
    """A sequence of `length` tokens of one layer over scattered blocks. layer: its heads."""

    def __init__(
        self, layer: LayerAttention, length: int, dtype: torch.dtype, device: torch.device, *, invariant: bool = True
    ) -> None:
        width = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
        self._qkv = random(device, length, width, dtype=dtype)
        self._heads = HeadWeights(layer, None, None)
        num_blocks = -(-length // BLOCK_SIZE)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(2)) + 1
        self._table = order.to(device, torch.int32)[None]
        pages = random(device, num_blocks + 1, 2, BLOCK_SIZE, layer.num_kv_heads, layer.head_dim, dtype=dtype, seed=3)
        spec = AttentionSpec(layer.num_kv_heads, layer.head_dim, layer.head_dim, dtype.itemsize)
        self._backend = TritonAttention(
            KVCacheLayout(BLOCK_SIZE, num_blocks + 1, *group_layers([spec], BLOCK_SIZE)),
            {layer.layer: pages},
            limits_of(device),
            num_heads=layer.num_heads,
            dtype=dtype,
            max_num_seqs=1,
            max_model_len=length,
            batch_invariant=invariant,
        )
        self.device, self.length = device, length

    def attend(self, start: int, end: int) -> torch.Tensor:
        """Rows of the tokens start..end-1, of which the earlier ones must have been attended: [end - start, H * D]."""

        def int32(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        positions = torch.arange(start, end, device=self.device)
        slots = self._table[0, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        count = end - start
        columns = int32(0), int32(0, count), int32(end)
        batch = DeviceBatch(1, count, count, end, *columns, positions, (slots,), (self._table,))
        return self._backend.plan(batch).attend(self._heads, self._qkv[start:end].clone(), None)

    def in_chunks(self, size: int) -> torch.Tensor:
        parts = [self.attend(start, min(start + size, self.length)) for start in range(0, self.length, size)]
        return torch.cat(parts)


def main() -> None:
    """A prompt and a decode in both modes, small: for a memory checker around this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layer = LayerAttention(0, 8, 2, 64, 0.1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for invariant in (False, True):
        sequence = Sequence(layer, 128 if device.type == "cuda" else 20, dtype, device, invariant=invariant)
        sequence.attend(0, sequence.length - 1)
        sequence.attend(sequence.length - 1, sequence.length)
    if device.type == "cuda":
        torch.cuda.synchronize()
    sys.stdout.write("launched\n")


if __name__ == "__main__":
    main()
