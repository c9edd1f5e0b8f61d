"""Attention back end of the native CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from quire.attention.dealt import DealtTokens
from quire.attention.interface import AttentionBatch, AttentionStep
from quire.kernels.arguments import HeadWeights, IndexShape, LatentExpansion, LatentShape
from quire.kernels.cpu import _native
from quire.kernels.cpu.paged_attention import CACHE_TYPES, AttentionPlans
from quire.kernels.cpu.recorder import Buffer, address_of
from quire.kv_cache.deal import ALL_TOKENS
from quire.kv_cache.layout import KVCacheLayout

Inputs: TypeAlias = tuple[Buffer, Buffer, Buffer, Buffer]
LATENT_ROWS = ("query", "turned_query", "latent", "turned_key")


class NativeAttention:
    """Pool's memory for recorded kernels, and the plan of each step. pages[j]: [num_blocks, page bytes] uint8.
    cache_dtype: a key of CACHE_TYPES. num_heads: query heads per layer. num_threads: the kernels' pool's. dealt: ranks
    that share tokens, in layers whose spec says so (None: no layer)."""

    def __init__(
        self,
        layout: KVCacheLayout,
        pages: Sequence[torch.Tensor],
        cache_dtype: str,
        num_heads: int,
        num_threads: int,
        dealt: DealtTokens | None = None,
    ) -> None:
        self._layout = layout
        self._pages = list(pages)
        self._cache_type = CACHE_TYPES[cache_dtype]
        self._page_of_layer = {
            layer: (index, page)
            for index, group in enumerate(layout.token_groups)
            for page, layer in enumerate(group.layers)
        }
        self._dealt, deal = dealt, ALL_TOKENS if dealt is None else dealt.deal
        self._plans, self._plans_beside = (AttentionPlans(layout, num_heads, num_threads, deal) for _ in range(2))
        self.num_threads = num_threads
        self.latent_dtype = torch.bfloat16 if cache_dtype == "bfloat16" else torch.float32

    def plan(self, batch: AttentionBatch) -> NativeAttentionStep:
        """Plan a step. Raises ValueError for blocks outside the pool."""
        return NativeAttentionStep(self, self._plans.set(batch), batch)

    @property
    def plans(self) -> list[_native.AttentionPlan]:
        """Plans by KV group of the last planned step, set by native code (quire/worker/platform/native_columns.py)."""
        return self._plans.plans

    def plan_beside(self, batch: AttentionBatch) -> list[_native.AttentionPlan]:
        """Further plans by KV group, for some sequences or other ranks' rows of the planned step; valid until the next
        call."""
        return self._plans_beside.set(batch)

    @property
    def block_size(self) -> int:
        """Tokens per kernel block."""
        return self._layout.block_size

    def dealt_in(self, layer: int) -> DealtTokens | None:
        """Ranks that share a layer's tokens (None: none)."""
        group, _ = self._page_of_layer[layer]
        return self._dealt if self._layout.token_groups[group].spec.dealt_to > 1 else None

    def latent_rows(self, layer: int) -> tuple[int, torch.Tensor]:
        """KV group of a layer, and its latents in slot order, [slots, width]."""
        group, page = self._page_of_layer[layer]
        rows = self._pages[page].view(-1).view(self.latent_dtype)
        return group, rows.view(-1, self._layout.token_groups[group].spec.token_bytes // rows.itemsize)

    def head_constants(self, heads: HeadWeights, rotation: Buffer | None = None) -> dict[str, Any]:
        """Arguments of `_native.Program.attention` for a layer, besides buffers."""
        layer, norms = heads.shape, (heads.query_norm, heads.key_norm)
        query_norm, key_norm = (0 if norm is None else address_of(norm.weight) for norm in norms)
        return {
            **self._page_constants(layer.layer),
            "num_heads": self._attended_heads(layer.layer, layer.num_heads),
            "num_kv_heads": layer.num_kv_heads,
            "head_dim": layer.head_dim,
            "scale": layer.stored_scale,
            "key_scale": layer.cache_scale.key,
            "value_scale": layer.cache_scale.value,
            "soft_cap": layer.soft_cap or 0.0,
            "window": layer.window or 0,
            "chunked": layer.is_chunked,
            "length_floor": 0 if layer.length_scale is None else layer.length_scale.floor,
            "length_strength": 0.0 if layer.length_scale is None else layer.length_scale.strength,
            "sinks": 0 if layer.sinks is None else layer.sinks.data_ptr(),
            "query_norm": query_norm,
            "key_norm": key_norm,
            "norm_epsilon": 0.0 if heads.query_norm is None else heads.query_norm.epsilon,
            "rotary_dim": 0 if rotation is None else rotation.width,
        }

    def latent_constants(self, shape: LatentShape) -> dict[str, Any]:
        """Arguments of `_native.Program.latent` for a layer, besides buffers."""
        return {
            **self._page_constants(shape.layer),
            "num_heads": self._attended_heads(shape.layer, shape.num_heads),
            "rank": shape.rank,
            "rope_dim": shape.rope_dim,
            "scale": shape.scale,
            "top": shape.top,
        }

    def index_constants(self, shape: IndexShape) -> dict[str, Any]:
        """Arguments of `_native.Program.select_keys` for a layer, besides buffers."""
        return {
            **self._page_constants(shape.layer),
            "latent_width": shape.latent_width,
            "num_heads": shape.num_heads,
            "dim": shape.dim,
            "rope_dim": shape.rope_dim,
            "top": shape.top,
            "scale": shape.scale,
        }

    def _attended_heads(self, layer: int, num_heads: int) -> int:
        dealt = self.dealt_in(layer)
        return num_heads if dealt is None else num_heads * dealt.deal.num_ranks

    def _page_constants(self, layer: int) -> dict[str, Any]:
        group, page = self._page_of_layer[layer]
        pages, kernel_blocks = self._pages[page], self._layout.kernel_blocks(self._layout.token_groups[group])
        return {
            "group": group,
            "cache": self._cache_type,
            "pages": pages.data_ptr(),
            "block_bytes": pages.stride(0) // kernel_blocks,
            "num_blocks": self._layout.num_blocks * kernel_blocks,
            "block_size": self._layout.block_size,
        }


class RecordedAttention(AttentionStep):
    """Operations that record kernels over a pool, for any step: each run brings its plans."""

    __slots__ = ("backend",)

    def __init__(self, backend: NativeAttention) -> None:
        self.backend = backend

    def attend(self, heads: HeadWeights, qkv: Buffer, rotation: Buffer | None) -> Buffer:
        qkv.recorder.keep.append(heads)
        dealt = self.backend.dealt_in(heads.shape.layer)
        if dealt is not None:
            return self.attend_dealt(dealt, heads, self.write_rows(heads, qkv, rotation))
        return qkv.recorder.call(
            "attention",
            heads.shape.num_heads * heads.shape.head_dim,
            buffers={"qkv": qkv, "rotation": rotation},
            **self.backend.head_constants(heads, rotation),
        )

    def write_rows(self, heads: HeadWeights, qkv: Buffer, rotation: Buffer | None) -> Buffer:
        """Record norms, rotation and write of rows' keys and values, without attention."""
        return qkv.recorder.call(
            "attention",
            qkv.width,
            over=qkv,
            in_place=True,
            output="qkv",
            buffers={"rotation": rotation, "out": None},
            query_heads=heads.shape.num_heads,
            **self.backend.head_constants(heads, rotation),
        )

    def attend_dealt(self, dealt: DealtTokens, heads: HeadWeights, rows: Buffer) -> Buffer:
        """Record attention of written rows over all ranks' tokens."""
        num_heads, dim = heads.shape.num_heads, heads.shape.head_dim
        queries = _gather(dealt, rows, num_heads * dim)
        parts = rows.recorder.call(
            "attention",
            queries.width + dealt.deal.num_ranks * num_heads,
            buffers={"qkv": queries, "rotation": None},
            writes=False,
            parts=True,
            **self.backend.head_constants(heads),
        )
        return _merge(dealt, parts, num_heads, dim)

    def attend_latent(
        self, shape: LatentShape, inputs: Inputs, rotation: Buffer | None, selected: Buffer | None = None
    ) -> Buffer:
        dealt = self.backend.dealt_in(shape.layer)
        if dealt is not None:
            self.write_latents(shape, inputs, rotation)
            return self.attend_dealt_latents(dealt, shape, inputs)
        buffers = {**dict(zip(LATENT_ROWS, inputs, strict=True)), "rotation": rotation, "selected": selected}
        constants = self.backend.latent_constants(shape)
        return inputs[0].recorder.call("latent", inputs[0].width, buffers=buffers, **constants)

    def write_latents(self, shape: LatentShape, inputs: Inputs, rotation: Buffer | None) -> Buffer:
        """Record rotation and write of rows' latents, without attention. Returns the keys."""
        query, turned_query, latent, turned_key = inputs
        return query.recorder.call(
            "latent",
            turned_key.width,
            over=turned_key,
            in_place=True,
            output=LATENT_ROWS[-1],
            buffers={"turned_query": turned_query, "latent": latent, "rotation": rotation}
            | dict.fromkeys(("query", "selected", "out")),
            query_heads=shape.num_heads,
            **self.backend.latent_constants(shape),
        )

    def attend_dealt_latents(self, dealt: DealtTokens, shape: LatentShape, inputs: Inputs) -> Buffer:
        """Record attention of written rows over all ranks' latents."""
        queries, turned = (_gather(dealt, rows, rows.width) for rows in inputs[:2])
        absent = dict.fromkeys((*LATENT_ROWS[2:], "rotation", "selected"))
        parts = queries.recorder.call(
            "latent",
            queries.width + dealt.deal.num_ranks * shape.num_heads,
            buffers={"query": queries, "turned_query": turned, **absent},
            writes=False,
            parts=True,
            **self.backend.latent_constants(shape),
        )
        return _merge(dealt, parts, shape.num_heads, shape.rank)

    def attend_expanded(
        self, shape: LatentShape, expansion: LatentExpansion, inputs: Inputs, rotation: Buffer | None
    ) -> Buffer:
        """All tokens absorbed; steps with prompts are recorded with ExpandingAttention."""
        absorbed = (expansion.absorb(inputs[0]), *inputs[1:])
        values: Buffer = expansion.values(self.attend_latent(shape, absorbed, rotation))
        return values

    def select_keys(self, shape: IndexShape, inputs: tuple[Buffer, Buffer, Buffer], rotation: Buffer | None) -> Buffer:
        query, key, weights = inputs
        return query.recorder.call(
            "select_keys",
            shape.top,
            buffers={"query": query, "key": key, "weights": weights, "rotation": rotation},
            **self.backend.index_constants(shape),
        )


def _gather(dealt: DealtTokens, x: Buffer, width: int) -> Buffer:
    native, count = dealt.group.native, dealt.deal.num_ranks
    if native is None:
        return x.recorder.call_torch(partial(dealt.gather, width), count * width, [x])
    every = count * width
    return x.recorder.call("all_gather", every, buffers={"x": x}, ranks=native, width=every, count=count)


def _merge(dealt: DealtTokens, parts: Buffer, num_heads: int, dim: int) -> Buffer:
    native, count, width = dealt.group.native, dealt.deal.num_ranks, num_heads * dim
    if native is None:
        return parts.recorder.call_torch(partial(dealt.merge, num_heads, dim), width, [parts])
    sizes: dict[str, Any] = {"count": count, "num_heads": num_heads, "head_dim": dim}
    return parts.recorder.call("merge_parts", width, buffers={"x": parts}, ranks=native, **sizes)


class NativeAttentionStep(RecordedAttention):
    """One planned step, also a recording's. plans: one per KV group, valid until the back end plans again."""

    __slots__ = ("batch", "plans")

    def __init__(self, backend: NativeAttention, plans: list[_native.AttentionPlan], batch: AttentionBatch) -> None:
        super().__init__(backend)
        self.plans = plans
        self.batch = batch
