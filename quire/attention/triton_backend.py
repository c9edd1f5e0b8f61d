"""The attention back end of the Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.attention.device_batch import DeviceBatch
from quire.kernels.triton.attention_tiles import (
    MIDDLE_ROWS,
    SMALL_ROWS,
    SPLITTING_PAYS,
    DeviceLimits,
    HeadShape,
    SplitPlan,
    Tiles,
    fixed_split_plan,
    fixed_tiles,
    scratch_rows,
    split_plan,
    varlen_tiles,
)
from quire.kernels.triton.decode_attention import SplitScratch, split_attention
from quire.kernels.triton.paged_attention import PagedAttention, varlen_attention
from quire.kernels.triton.qkv_write import Rotation, prepare_heads
from quire.kv_cache.layout import KVCacheLayout
from quire.layers.operations import HeadWeights


class TritonAttention:
    """Knows the pool and the device, and holds the scratch for splits, which all layers and graphs share.

    pages[j]: [num_blocks, 2, block_size, num_kv_heads, head_dim] of bfloat16, float16 or float32, on the device.
    num_heads: query heads of every layer; dtype: of activations. max_num_seqs, max_model_len: the largest batch that
    the scratch must serve. batch_invariant: a row's bits depend on its own sequence alone, since tiles and splits are
    of one size and at fixed positions; otherwise both are chosen for speed.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        pages: Sequence[torch.Tensor],
        limits: DeviceLimits,
        *,
        num_heads: int,
        dtype: torch.dtype,
        max_num_seqs: int,
        max_model_len: int,
        batch_invariant: bool = False,
    ) -> None:
        self.pages = list(pages)
        self.page_of_layer = {
            layer: (index, page) for index, group in enumerate(layout.groups) for page, layer in enumerate(group.layers)
        }
        _, _, _, num_kv_heads, head_dim = self.pages[0].shape
        # Of two dtypes, both are multiplied in float32.
        itemsize = dtype.itemsize if dtype == self.pages[0].dtype else 4
        self.shape = HeadShape(num_heads, num_kv_heads, head_dim, itemsize)
        self._limits = limits
        self._batch_invariant = batch_invariant
        plans = ((count, self._split_plan(count, max_model_len, None)) for count in range(1, max_num_seqs + 1))
        rows = max((scratch_rows(plan, self.shape, count) for count, plan in plans if plan is not None), default=0)
        self.scratch = SplitScratch.allocate(rows, head_dim, self.pages[0].device)

    def plan(self, batch: DeviceBatch) -> TritonAttentionStep:
        """No device is asked and nothing is launched: a plan is as good for the replays of a graph as for one step."""
        return TritonAttentionStep(self, batch)

    def kernels(self, batch: DeviceBatch, window: int | None) -> tuple[Tiles | None, SplitPlan | None]:
        """How the varlen kernel and how the split kernel run over a batch (None: it does not). Sequences with at most
        `SplitPlan.tokens` new tokens are the split kernel's, if it runs."""
        split = self._split_plan(batch.num_seqs, batch.max_seq_len, window)
        if split is not None and batch.max_query_len <= split.tokens:
            return None, split
        no_short_ones = batch.num_tokens == batch.num_seqs * batch.max_query_len
        if no_short_ones or batch.max_seq_len < SPLITTING_PAYS:
            split = None
        if self._batch_invariant:
            return fixed_tiles(self.shape, self._limits), split
        return varlen_tiles(self.shape, batch.max_query_len, self._limits), split

    def query_lengths_to_compile(self) -> tuple[int, ...]:
        """Values of `max_query_len` that between them need every kernel, in batches of two or more sequences, one of
        them shorter, and a `max_seq_len` of max_model_len: a step of padding with each compiles all while starting."""
        if self._batch_invariant:
            return 1, 2
        return 1, *(rows // self.shape.group + 1 for rows in (SMALL_ROWS, MIDDLE_ROWS))

    def _split_plan(self, num_seqs: int, max_seq_len: int, window: int | None) -> SplitPlan | None:
        if self._batch_invariant:
            return fixed_split_plan(self.shape, num_seqs, max_seq_len, window, self._limits)
        return split_plan(self.shape, num_seqs, max_seq_len, self._limits)


class TritonAttentionStep:
    """One step. Nothing is allocated besides results; all launches depend on addresses and host sizes alone."""

    def __init__(self, backend: TritonAttention, batch: DeviceBatch) -> None:
        self._backend = backend
        self._batch = batch
        self._kernels: dict[int | None, tuple[Tiles | None, SplitPlan | None]] = {}

    def attend(
        self, heads: HeadWeights, qkv: torch.Tensor, rotation: Rotation | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Norms over heads, rotation, keys and values to their pages, attention.

        qkv: [T, (num_heads + 2 num_kv_heads) * head_dim], contiguous, used up. rotation: of the T positions, or None.
        out: [T, num_heads * head_dim] of any float dtype, or None for a new tensor of qkv's. Rows of padding are left
        as they are. Causal: a token sees positions up to its own, of its own sequence.
        """
        layer = heads.shape
        group, page = self._backend.page_of_layer[layer.layer]
        pages = self._backend.pages[page]
        if out is None:
            out = torch.empty(qkv.shape[0], layer.num_heads * layer.head_dim, dtype=qkv.dtype, device=qkv.device)
        prepare_heads(heads, qkv, rotation, pages, self._batch.slot_mapping[group])
        self._attend(PagedAttention(qkv, pages, out, self._batch, group, layer))
        return out

    def _attend(self, work: PagedAttention) -> None:
        layer = work.layer
        if layer.window not in self._kernels:
            self._kernels[layer.window] = self._backend.kernels(self._batch, layer.window)
        tiles, split = self._kernels[layer.window]
        if split is not None:
            split_attention(work, split, self._backend.scratch)
        if tiles is not None:
            varlen_attention(work, tiles, skipped=0 if split is None else split.tokens)
