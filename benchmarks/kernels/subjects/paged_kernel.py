"""The native attention kernel over a cache of blocks of any size, with OPT-13B's heads."""

from __future__ import annotations

import torch

from quire.attention.interface import AttentionBatch
from quire.attention.native_backend import NativeAttention, RecordedAttention
from quire.kernels.arguments import HeadWeights, LayerAttention
from quire.kernels.cpu.memory import allocate
from quire.kernels.cpu.paged_attention import block_bytes
from quire.kernels.cpu.recorder import Recorder
from quire.kernels.cpu.runtime import NativeRuntime
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import AttentionSpec

NUM_HEADS, HEAD_DIM = 40, 128
CACHE_DTYPE, CACHE_BYTES = "bfloat16", 2
CHUNK = 256
"""Rows that are written to the cache at a time."""
TOLERANCE = 1e-4
"""Of results that were added up in another order."""


class PagedKernel:
    """Attention of the last token of each sequence in one layer, on one thread. What the cache holds does not depend on
    block_size (a power of two that divides `context`); blocks are handed out in random order."""

    def __init__(self, num_sequences: int, context: int, block_size: int) -> None:
        num_blocks = 1 + num_sequences * context // block_size
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(0))
        tables = 1 + order.view(num_sequences, -1)
        spec = AttentionSpec(NUM_HEADS, HEAD_DIM, HEAD_DIM, CACHE_BYTES, 0)
        layout = KVCacheLayout(block_size, num_blocks, *group_layers([spec], block_size))
        page_bytes = block_bytes(block_size, NUM_HEADS, HEAD_DIM, CACHE_DTYPE)
        self._pages = allocate(num_blocks * page_bytes).view(num_blocks, page_bytes)
        self._backend = NativeAttention(layout, [self._pages], CACHE_DTYPE, NUM_HEADS, 1)
        self._runtime = NativeRuntime("auto", 1)
        places = torch.arange(context)
        slots = tables[:, places // block_size] * block_size + places % block_size
        for start in range(0, slots.numel(), CHUNK):
            part = slots.flatten()[start : start + CHUNK]
            # Each a sequence of one token: its keys and values are written to its slot, and nothing long is read.
            self._prepare(start + 1, part, torch.zeros_like(part), part[:, None] // block_size)
            self.run()
        last = slots[:, -1].contiguous()
        self._prepare(0, last, torch.full_like(last, context - 1), tables)

    def run(self) -> int:
        """Write keys and values of the new tokens, and attend; 1, for one call."""
        self._program.run(
            len(self._rows), (None, self._positions), plans=self._plans, externals=[self._rows, self.result]
        )
        return 1

    def agrees(self, other: PagedKernel) -> bool:
        """Whether both compute the same, apart from rounding."""
        self.run()
        other.run()
        return torch.allclose(self.result, other.result, atol=TOLERANCE) and bool(self.result.abs().max() > 0)

    def _prepare(self, seed: int, slots: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor) -> None:
        """One token of each of len(slots) sequences, at `positions`: int64 [B]; tables: [B, blocks]. Queries, keys and
        values are random."""
        hidden, count = NUM_HEADS * HEAD_DIM, len(slots)
        starts = torch.arange(count + 1)
        batch = AttentionBatch(
            starts, positions, positions, starts[:-1], (tables.to(torch.int32).contiguous(),), (slots.contiguous(),)
        )
        self._rows = torch.randn(count, 3 * hidden, generator=torch.Generator().manual_seed(seed))
        self.result = torch.zeros(count, hidden)
        self._positions, self._plans = positions, self._backend.plan(batch).plans
        layer = LayerAttention(0, NUM_HEADS, NUM_HEADS, HEAD_DIM, HEAD_DIM**-0.5)
        recorder = Recorder()
        source = recorder.external(3 * hidden, 3 * hidden)
        target = recorder.external(hidden, hidden)
        attended = RecordedAttention(self._backend).attend(HeadWeights(layer, None, None), source, None)
        recorder.redirect(attended, target)
        self._program = recorder.finish_program(attended, self._runtime, count)
