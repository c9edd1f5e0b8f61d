"""Torch attention back end: batch-invariant, and correct on every machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from quire.attention.expanded import Prompt, attend_expanded, expanded_prompts, rest_of
from quire.attention.interface import AttentionBatch, AttentionStep
from quire.attention.tile_attention import attend_tiles
from quire.attention.tiles import KEY_TILE, Sequences, TileList, Window, plan_tiles
from quire.attention.torch_index import select_keys
from quire.kernels import reference
from quire.kernels.arguments import (
    ExpansionRule,
    HeadWeights,
    IndexShape,
    LatentExpansion,
    LatentShape,
    LayerAttention,
    NormWeights,
)
from quire.kernels.rotation import Rotation
from quire.kv_cache.layout import NULL_BLOCK, KVCacheLayout

Inputs: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
CHUNK_BYTES = 4 << 20
"""Bytes of one chunk of items: about a core's caches."""


class TorchAttention:
    """AttentionBackend over torch operators. Block 0, which no sequence owns, is zeroed. pages: by layer, in kernel
    blocks: [num_blocks, 2, block_size, num_kv_heads, head_dim]; for values of another width [num_blocks, block_size,
    num_kv_heads, head_dim + value_width]; for latents [num_blocks, block_size, width]."""

    def __init__(self, layout: KVCacheLayout, pages: Mapping[int, torch.Tensor]) -> None:
        self._block_size = layout.block_size
        self._layers: dict[int, tuple[int, torch.Tensor]] = {}
        for index, group in enumerate(layout.token_groups):
            for layer in group.layers:
                self._layers[layer] = index, pages[layer]
                pages[layer][NULL_BLOCK : NULL_BLOCK + layout.kernel_blocks(group)].zero_()

    def plan(self, batch: AttentionBatch) -> TorchAttentionStep:
        return TorchAttentionStep(self._layers, self._block_size, batch)


class TorchAttentionStep(AttentionStep):
    """One planned step. Layers of a kind share its work lists."""

    def __init__(self, layers: dict[int, tuple[int, torch.Tensor]], block_size: int, batch: AttentionBatch) -> None:
        """layers: token group and pages of each layer."""
        self._layers = layers
        self._block_size = block_size
        self._batch = batch
        self._key_rows = [reference.key_rows(slots, block_size) for slots in batch.slot_mapping]
        self._lists: dict[tuple[int, int, int, int, Window], list[TileList]] = {}
        self._splits: dict[ExpansionRule, _Split] = {}

    def attend(self, heads: HeadWeights, qkv: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
        layer = heads.shape
        widths = [layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim]
        query, key, value = qkv.split((*widths, layer.num_kv_heads * layer.value_width), 1)
        key = _prepared(key.unflatten(1, (-1, layer.head_dim)), heads.key_norm, rotation)
        value = value.unflatten(1, (-1, layer.value_width))
        group, pages = self._layers[layer.layer]
        scale = layer.cache_scale
        key, value = (each if by == 1 else each.float() / by for each, by in ((key, scale.key), (value, scale.value)))
        if pages.dim() == 4:  # keys and values of different widths, side by side
            rows = pages.view(-1, *pages.shape[2:])
            reference.write_rows(rows, self._batch.slot_mapping[group], torch.cat((key, value), dim=-1))
        else:
            reference.write_kv(pages, self._key_rows[group], key, value)
        query = _prepared(query.unflatten(1, (-1, layer.head_dim)), heads.query_norm, rotation)
        return self._attended(layer, query).flatten(1)

    def attend_latent(
        self,
        shape: LatentShape,
        inputs: Inputs,
        rotation: Rotation | None,
        selected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query, turned_query = inputs[0], self._write_latent(shape, inputs, rotation)
        query = torch.cat((query.unflatten(1, (shape.num_heads, shape.rank)), turned_query), dim=2)
        if selected is not None:
            return self._attended_selected(shape.as_attention, query, selected).flatten(1)
        return self._attended(shape.as_attention, query).flatten(1)

    def attend_expanded(
        self, shape: LatentShape, expansion: LatentExpansion, inputs: Inputs, rotation: Rotation | None
    ) -> torch.Tensor:
        query, turned_query = inputs[0], self._write_latent(shape, inputs, rotation)
        out = query.new_empty(len(query), shape.num_heads * expansion.value_dim)
        prompts, tokens, rest = self._split(expansion.rule(shape))
        if rest is not None:
            absorbed = expansion.absorb(query[tokens]).unflatten(1, (shape.num_heads, shape.rank))
            absorbed = torch.cat((absorbed, turned_query[tokens]), dim=2)
            out[tokens] = expansion.values(rest._attended(shape.as_attention, absorbed).flatten(1))
        query = query.unflatten(1, (shape.num_heads, expansion.nope_dim))
        for prompt in prompts:
            queries = query[prompt.tokens], turned_query[prompt.tokens]
            kept = self._latents(shape, prompt)
            out[prompt.tokens] = attend_expanded(shape, expansion, queries, kept, prompt.start)
        return out

    def select_keys(
        self,
        shape: IndexShape,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: Rotation | None,
    ) -> torch.Tensor:
        query, key, weights = inputs
        query = _prepared(query.unflatten(1, (shape.num_heads, shape.dim)), None, rotation)
        group, pages = self._layers[shape.layer]
        keys = pages.view(-1, pages.shape[-1])[:, shape.latent_width :]
        written = _prepared(key[:, None], None, rotation)[:, 0].to(keys.dtype)
        keys.index_copy_(0, self._batch.slot_mapping[group], written)
        return select_keys(shape, self._batch, group, keys, self._block_size, (query, weights))

    def _write_latent(self, shape: LatentShape, inputs: Inputs, rotation: Rotation | None) -> torch.Tensor:
        """Store the latents with their rotated keys. Returns the rotated queries, [T, num_heads, rope_dim]."""
        _, turned_query, latent, turned_key = inputs
        turned_key = _prepared(turned_key[:, None], None, rotation)
        group, pages = self._layers[shape.layer]
        rows = pages.view(-1, pages.shape[-1])[:, : shape.width]
        written = torch.cat((latent, turned_key[:, 0]), dim=1).to(rows.dtype)
        rows.index_copy_(0, self._batch.slot_mapping[group], written)
        return _prepared(turned_query.unflatten(1, (shape.num_heads, shape.rope_dim)), None, rotation)

    def _split(self, rule: ExpansionRule) -> _Split:
        if rule not in self._splits:
            batch = self._batch
            prompts = expanded_prompts(rule, batch.query_start.numpy(), batch.start_positions.numpy())
            found = rest_of(batch, prompts)
            if found is None:
                self._splits[rule] = _Split(prompts)
            else:
                rest = TorchAttentionStep(self._layers, self._block_size, found[1])
                self._splits[rule] = _Split(prompts, found[0], rest)
        return self._splits[rule]

    def _latents(self, shape: LatentShape, prompt: Prompt) -> torch.Tensor:
        """[num_keys, width]: latents of a prompt's tokens in the layer, the step's included."""
        group, pages = self._layers[shape.layer]
        blocks = self._batch.block_tables[group][prompt.sequence, : -(-prompt.num_keys // self._block_size)].long()
        return pages[blocks].flatten(0, 1)[: prompt.num_keys, : shape.width]

    def _attended_selected(self, layer: LayerAttention, q: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
        group, pages = self._layers[layer.layer]
        batch, top = self._batch, selected.shape[1]
        counts = (batch.slot_positions + 1).clamp(max=top)
        places = torch.arange(int(counts.max())).expand(len(q), -1)
        read = torch.where((batch.slot_positions >= top)[:, None], selected[:, : places.shape[1]].long(), places)
        tables = batch.block_tables[group].long()
        blocks = tables[batch.sequence_index[:, None], (read // self._block_size).clamp(max=tables.shape[1] - 1)]
        tokens = Sequences(
            first_token=np.arange(len(q)),
            start=counts.numpy() - 1,
            num_tokens=np.ones(len(q), dtype=np.int64),
            block_table=(blocks * self._block_size + read % self._block_size).numpy(),
            block_size=1,
        )
        lists = plan_tiles(
            tokens,
            heads_per_group=layer.num_heads,
            window=Window(),
            item_bytes=(8 * KEY_TILE * layer.head_dim, 8 * KEY_TILE + 4 * layer.head_dim),
            limit=CHUNK_BYTES,
        )
        out = q.new_empty(len(q), layer.num_heads, layer.value_width)
        for tiles in lists:
            attended = attend_tiles(tiles, layer, pages.view(-1, 1, pages.shape[-1]), q)
            out.index_copy_(0, tiles.tokens, attended.index_select(0, tiles.places).to(q.dtype))
        return out

    def _attended(self, layer: LayerAttention, q: torch.Tensor) -> torch.Tensor:
        """Attend over written keys and values. q: [T, num_heads, head_dim]. Returns [T, num_heads, value_width] in q's
        dtype."""
        group, pages = self._layers[layer.layer]
        if layer.length_scale is not None:
            q = (q.float() * layer.length_scale.factors(self._batch.slot_positions)[:, None, None]).to(q.dtype)
        out = q.new_empty(len(q), layer.num_heads, layer.value_width)
        for tiles in self._tile_lists(group, layer):
            attended = attend_tiles(tiles, layer, pages, q)
            out.index_copy_(0, tiles.tokens, attended.index_select(0, tiles.places).to(q.dtype))
        return out

    def _tile_lists(self, group: int, layer: LayerAttention) -> list[TileList]:
        window = Window(layer.window, layer.is_chunked)
        key = (group, layer.num_heads, layer.num_kv_heads, layer.head_dim, window)
        if key not in self._lists:
            batch = self._batch
            query_start = batch.query_start.numpy()
            sequences = Sequences(
                first_token=query_start[:-1],
                start=batch.start_positions.numpy(),
                num_tokens=np.diff(query_start),
                block_table=batch.block_tables[group].numpy(),
                block_size=self._block_size,
                last_seen=None if batch.last_seen is None else batch.last_seen.numpy(),
            )
            # Bytes in float32: keys and values; per row its scores, their exponentials and the weighted value.
            heads, dim = 4 * layer.num_kv_heads, layer.head_dim
            self._lists[key] = plan_tiles(
                sequences,
                heads_per_group=layer.num_heads // layer.num_kv_heads,
                window=window,
                item_bytes=(heads * 2 * KEY_TILE * dim, heads * (2 * KEY_TILE + dim)),
                limit=CHUNK_BYTES,
            )
        return self._lists[key]


class _Split(NamedTuple):
    """Step in two parts. prompts: expanded sequences. tokens: indices of the other tokens; rest: their step, None
    without them."""

    prompts: Sequence[Prompt]
    tokens: torch.Tensor | None = None
    rest: TorchAttentionStep | None = None


def _prepared(heads: torch.Tensor, norm: NormWeights | None, rotation: Rotation | None) -> torch.Tensor:
    if norm is not None:
        heads = reference.norm(norm, heads)
    return heads if rotation is None else rotation.apply(heads)
