"""Attention back ends of the Triton kernels: paged, latent, and encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from quire.attention.device_batch import DeviceBatch
from quire.attention.interface import AttentionStep
from quire.attention.triton_expanded import DeviceExpansion, Inputs
from quire.kernels.arguments import HeadWeights, IndexShape, LatentExpansion, LatentShape
from quire.kernels.rotation import DeviceRotation
from quire.kernels.triton.attention_tiles import (
    MIDDLE_ROWS,
    SHORT_CONTEXT,
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
from quire.kernels.triton.decode_attention import SplitAttention, SplitScratch
from quire.kernels.triton.encoder_attention import attend_both_ways
from quire.kernels.triton.float8 import multiplied_bytes
from quire.kernels.triton.latent_attention import LatentKernels, LatentScratch, latent_tiles
from quire.kernels.triton.latent_index import select_keys
from quire.kernels.triton.paged_attention import PagedAttention, VarlenAttention
from quire.kernels.triton.prompt_attention import WarpGroupAttention, allows_warp_groups
from quire.kernels.triton.qkv_write import HeadPreparation
from quire.kv_cache.layout import FOREIGN_LAYER, KVCacheLayout


class TritonAttention:
    """Attention on a device's pool; layers of a shape and all graphs share its scratch. pages: by layer in kernel
    blocks, [num_blocks, 2, block_size, num_kv_heads, head_dim] of bfloat16, float16, float32 or e4m3 (or its bits,
    uint8); latents [num_blocks, block_size, width]. num_heads: query heads per layer. dtype: the activations'.
    max_num_seqs, max_model_len: largest batch. batch_invariant: fixed tiles and splits."""

    def __init__(
        self,
        layout: KVCacheLayout,
        pages: Mapping[int, torch.Tensor],
        limits: DeviceLimits,
        *,
        num_heads: int,
        dtype: torch.dtype,
        max_num_seqs: int,
        max_model_len: int,
        batch_invariant: bool = False,
    ) -> None:
        self.layers: dict[int, LayerPages] = {}
        self.scratch: dict[HeadShape, SplitScratch] = {}
        self._limits = limits
        self._dtype = dtype
        self._batch_invariant = batch_invariant
        self.latents = DeviceLatents(
            num_heads, dtype, max_num_seqs, max_model_len, limits, batch_invariant=batch_invariant
        )
        for index, group in enumerate(layout.token_groups):
            for layer in group.layers:
                if layer == FOREIGN_LAYER:
                    continue
                if group.spec.kind == "latent":
                    self.latents.add_layer(layer, index, pages[layer])
                    continue
                _, _, _, num_kv_heads, head_dim = pages[layer].shape
                itemsize = multiplied_bytes(dtype, pages[layer].dtype)
                shape = HeadShape(num_heads, num_kv_heads, head_dim, itemsize)
                self.layers[layer] = LayerPages(index, shape, pages[layer])
                if shape not in self.scratch:
                    self.scratch[shape] = self._allocate_scratch(
                        shape, max_num_seqs, max_model_len, pages[layer].device
                    )
        self._kernels: dict[int, _LayerKernels] = {}

    def plan(self, batch: DeviceBatch) -> TritonAttentionStep:
        """Plan a step without device queries or launches, valid for graph replays too."""
        return TritonAttentionStep(self, batch)

    def kernels(
        self, batch: DeviceBatch, shape: HeadShape, window: int | None, *, allow_warp_groups: bool = False
    ) -> tuple[Tiles | None, SplitPlan | None]:
        """Tiles of the varlen kernel and plan of the split kernel for a batch and head shape (None: that kernel does
        not run). The split kernel computes sequences with at most `SplitPlan.tokens` new tokens; never where tokens see
        later ones. allow_warp_groups: see `varlen_tiles`."""
        sees_ahead = batch.last_seen is not None
        split = None if sees_ahead else self._split_plan(shape, batch.num_seqs, batch.max_seq_len, window)
        if split is not None and batch.max_query_len <= split.tokens:
            return None, split
        no_short_ones = batch.num_tokens == batch.num_seqs * batch.max_query_len
        if no_short_ones or batch.max_seq_len < SPLITTING_PAYS:
            split = None
        if self._batch_invariant:
            return fixed_tiles(shape, self._limits), split
        lengths = batch.max_query_len, batch.max_seq_len
        allow_warp_groups &= not sees_ahead
        return varlen_tiles(shape, *lengths, self._limits, allow_warp_groups=allow_warp_groups), split

    def layer(self, heads: HeadWeights) -> _LayerKernels:
        """Kernels of a layer, bound to weights and pages at first use."""
        number = heads.shape.layer
        bound = self._kernels.get(number)
        if bound is None or bound.heads is not heads:
            layer = self.layers[number]
            bound = self._kernels[number] = _LayerKernels(heads, layer, self.scratch[layer.shape], self._dtype)
        return bound

    def lengths_to_compile(self, longest: int) -> tuple[tuple[int, int], ...]:
        """Values of (`max_query_len`, `max_seq_len`), at most `longest`, whose padding steps compile every kernel at
        the start."""
        if self._batch_invariant:
            return (1, longest), (2, longest)
        groups = {shape.group for shape in self.scratch} or {1}  # expanded heads share no keys
        lengths = sorted({rows // group + 1 for rows in (SMALL_ROWS, MIDDLE_ROWS) for group in groups})
        return (lengths[-1], min(longest, SHORT_CONTEXT)), *((length, longest) for length in (1, *lengths))

    def _split_plan(self, shape: HeadShape, num_seqs: int, max_seq_len: int, window: int | None) -> SplitPlan | None:
        if self._batch_invariant:
            return fixed_split_plan(shape, num_seqs, max_seq_len, window, self._limits)
        return split_plan(shape, num_seqs, max_seq_len, self._limits)

    def _allocate_scratch(
        self, shape: HeadShape, max_num_seqs: int, max_model_len: int, device: torch.device
    ) -> SplitScratch:
        plans = ((count, self._split_plan(shape, count, max_model_len, None)) for count in range(1, max_num_seqs + 1))
        rows = max((scratch_rows(plan, shape, count) for count, plan in plans if plan is not None), default=0)
        return SplitScratch.allocate(rows, shape.head_dim, device)


class LayerPages(NamedTuple):
    """One layer's memory in the pool. group: its KV group of tokens."""

    group: int
    shape: HeadShape
    pages: torch.Tensor


class _LayerKernels:
    def __init__(self, heads: HeadWeights, layer: LayerPages, scratch: SplitScratch, dtype: torch.dtype) -> None:
        """Bound kernels of one layer. dtype: the queries'."""
        self.heads = heads
        self.group, self.shape, self.pages = layer
        self.allows_warp_groups = allows_warp_groups(heads.shape, layer.pages, dtype)
        self.prepare = HeadPreparation(heads, layer.pages).launch
        self._scratch = scratch
        self._varlen: dict[tuple[Tiles, bool], VarlenAttention | WarpGroupAttention] = {}
        self._split: dict[tuple[Tiles, int], SplitAttention] = {}

    def varlen(self, tiles: Tiles, *, sees_ahead: bool) -> VarlenAttention | WarpGroupAttention:
        """Prompt kernel with these tiles. sees_ahead: for batches with `last_seen`."""
        found = self._varlen.get((tiles, sees_ahead))
        if found is None:
            layer = self.heads.shape
            if tiles.uses_warp_groups:
                found = WarpGroupAttention(layer, self.pages, tiles)
            else:
                found = VarlenAttention(layer, self.pages, layer.sinks, tiles, sees_ahead=sees_ahead)
            self._varlen[tiles, sees_ahead] = found
        return found

    def split(self, plan: SplitPlan) -> SplitAttention:
        key = plan.tiles, plan.tokens
        found = self._split.get(key)
        if found is None:
            found = self._split[key] = SplitAttention(
                self.heads.shape, self.pages, self.heads.shape.sinks, *key, self._scratch
            )
        return found


class TritonAttentionStep(AttentionStep):
    """One planned step. Operations write to `out` if given, else to a new tensor; inputs are contiguous."""

    def __init__(self, backend: TritonAttention, batch: DeviceBatch) -> None:
        self._backend = backend
        self._batch = batch
        self._kernels: dict[tuple[HeadShape, int | None, bool], tuple[Tiles | None, SplitPlan | None]] = {}

    def attend(
        self, heads: HeadWeights, qkv: torch.Tensor, rotation: DeviceRotation | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Write the step's keys and values and attend (AttentionStep.attend). out: any float dtype; padding rows are
        not written."""
        layer = self._backend.layer(heads)
        layer.prepare(qkv, rotation, self._batch.slot_mapping[layer.group])
        self._scale_queries(heads, qkv)
        return self._attend(layer, qkv, out)

    def attend_latent(
        self,
        shape: LatentShape,
        inputs: Inputs,
        rotation: DeviceRotation | None,
        selected: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kernels, group = self._backend.latents.layer(shape)
        out = torch.empty_like(inputs[0]) if out is None else out
        kernels.launch(inputs, rotation, out, self._batch, group, selected)
        return out

    def attend_expanded(
        self,
        shape: LatentShape,
        expansion: LatentExpansion,
        inputs: Inputs,
        rotation: DeviceRotation | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        latents = self._backend.latents
        layer = *latents.layer(shape), latents.pages[shape.layer][1]
        return latents.expansion.compute(shape, expansion, inputs, rotation, out, self._batch, layer)

    def select_keys(
        self,
        shape: IndexShape,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: DeviceRotation | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        group, pages = self._backend.latents.pages[shape.layer]
        if out is None:
            out = torch.empty(len(inputs[0]), shape.top, dtype=torch.int32, device=inputs[0].device)
        select_keys(shape, inputs, rotation, pages, self._batch, group, out)
        return out

    def _scale_queries(self, heads: HeadWeights, query: torch.Tensor) -> None:
        """Apply the `LengthScale` to queries in place. query: [T, >= num_heads * head_dim], heads first."""
        shape = heads.shape
        if shape.length_scale is not None:
            factors = shape.length_scale.factors(self._batch.slot_positions)[:, None]
            query[:, : shape.num_heads * shape.head_dim].mul_(factors)

    def _attend(self, layer: _LayerKernels, query: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """Attend over written pages. query: [T, >= num_heads * head_dim], heads first."""
        shape = layer.heads.shape
        if out is None:
            size = (query.shape[0], shape.num_heads * shape.head_dim)
            out = torch.empty(size, dtype=query.dtype, device=query.device)
        kind = layer.shape, shape.window, layer.allows_warp_groups
        if kind not in self._kernels:
            self._kernels[kind] = self._backend.kernels(
                self._batch, layer.shape, shape.window, allow_warp_groups=layer.allows_warp_groups
            )
        tiles, split = self._kernels[kind]
        work = PagedAttention(query, layer.pages, out, self._batch, layer.group, shape)
        if split is not None:
            layer.split(split).launch(work, split)
        if tiles is not None:
            kernel = layer.varlen(tiles, sees_ahead=self._batch.last_seen is not None)
            kernel.launch(work, skipped=0 if split is None else split.tokens)
        return out


class DeviceLatents:
    """Latent kernels, bound to a layer's pages at first use. max_num_seqs, max_model_len: largest batch, for all
    layers' scratch. pages: KV group and memory by layer."""

    def __init__(
        self,
        num_heads: int,
        dtype: torch.dtype,
        max_num_seqs: int,
        max_model_len: int,
        limits: DeviceLimits,
        *,
        batch_invariant: bool,
    ) -> None:
        self._dtype = dtype
        self._batch_invariant = batch_invariant
        self._limits = limits
        self._sizes = (num_heads, max_num_seqs, max_model_len)
        self.pages: dict[int, tuple[int, torch.Tensor]] = {}
        self.expansion = DeviceExpansion(max_model_len, limits)
        self._scratch: LatentScratch | None = None
        self._kernels: dict[int, LatentKernels] = {}

    def add_layer(self, layer: int, group: int, pages: torch.Tensor) -> None:
        """Register a layer when the pool is allocated. group: index among the KV groups of tokens. pages: [num_blocks,
        block_size, width], in kernel blocks."""
        self.pages[layer] = group, pages
        if self._scratch is None:
            num_heads, max_num_seqs, max_model_len = self._sizes
            self._scratch = LatentScratch.allocate(
                num_heads, pages.shape[2], max_num_seqs, max_model_len, pages.device, self._limits
            )

    def layer(self, shape: LatentShape) -> tuple[LatentKernels, int]:
        group, pages = self.pages[shape.layer]
        found = self._kernels.get(shape.layer)
        if found is None:
            assert self._scratch is not None, "there is scratch where there are pages"
            itemsize = multiplied_bytes(self._dtype, pages.dtype)
            tiles = latent_tiles(shape, itemsize, self._limits, batch_invariant=self._batch_invariant)
            found = self._kernels[shape.layer] = LatentKernels(shape, pages, tiles, self._scratch, self._limits)
        return found, group


class TritonEncoderStep(AttentionStep):
    """Bidirectional step."""

    def __init__(self, query_start: torch.Tensor) -> None:
        """query_start: [S + 1] int32, see DeviceBatch."""
        self._query_start = query_start

    def attend(self, heads: HeadWeights, qkv: torch.Tensor, rotation: DeviceRotation | None) -> torch.Tensor:
        turn, shape = None if rotation is None else (rotation.cos, rotation.sin), heads.shape
        return attend_both_ways(qkv, turn, self._query_start, shape.num_heads, shape.scale, shape.window)


class TritonEncoder:
    """Attention back end of encoders on a device, without a pool. Sequences are in a batch whole."""

    def plan(self, batch: DeviceBatch) -> TritonEncoderStep:
        return TritonEncoderStep(batch.query_start)

    def lengths_to_compile(self, longest: int) -> tuple[tuple[int, int], ...]:
        """Single pair: the encoder kernel has one kind of tiles."""
        return ((1, longest),)
