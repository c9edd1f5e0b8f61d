"""Attention of the tiles from quire/attention/tiles.py, in torch."""

from __future__ import annotations

import torch

from quire.attention.tiles import HIDDEN, KEY_TILE, Chunk, TileList
from quire.kernels.arguments import LayerAttention

Partial = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Softmax over some keys: maximum, sum of exponentials ([..., rows, 1] each) and weighted values ([..., rows, dim])."""


def attend_tiles(tiles: TileList, layer: LayerAttention, pages: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Attention of a tile list's tokens, [num_tiles * tile_tokens, num_heads, value_width] float32. pages: the layer's
    (TorchAttention). q: [T, num_heads, head_dim]."""
    groups, dim, value_width = layer.num_kv_heads, layer.head_dim, layer.value_width
    per_group = layer.num_heads // groups
    used_rows = tiles.tile_tokens * per_group
    queries = torch.zeros(tiles.num_tiles, groups, tiles.rows, dim)
    queries[:, :, :used_rows] = (
        (q.index_select(0, tiles.gather).float() * layer.stored_scale)
        .view(tiles.num_tiles, tiles.tile_tokens, groups, per_group, dim)
        .transpose(1, 2)
        .reshape(tiles.num_tiles, groups, used_rows, dim)
    )
    shape = (tiles.num_tiles, groups, tiles.rows)
    total: Partial = (torch.full((*shape, 1), HIDDEN), torch.zeros(*shape, 1), torch.zeros(*shape, value_width))
    for chunk in tiles.chunks:
        partial = _attend_chunk(tiles, chunk, layer, pages, queries)
        for left, right in chunk.levels:
            _store(partial, left, _merged(_select(partial, left), _select(partial, right)))
        result = _select(partial, chunk.roots)
        if not chunk.is_first:
            result = _merged(_select(total, chunk.root_tiles), result)
        _store(total, chunk.root_tiles, result)
    if layer.sinks is not None:
        sinks = layer.sinks.view(groups, 1, per_group).expand(-1, tiles.tile_tokens, -1).reshape(groups, used_rows, 1)
        seen = (total[0][:, :, :used_rows], total[1][:, :, :used_rows], total[2][:, :, :used_rows])
        total = _merged(seen, (sinks, torch.ones_like(sinks), torch.zeros(value_width)))
    return (
        (total[2] * layer.cache_scale.value / total[1])[:, :, :used_rows]
        .reshape(tiles.num_tiles, groups, tiles.tile_tokens, per_group, value_width)
        .transpose(1, 2)
        .reshape(-1, layer.num_heads, value_width)
    )


def _attend_chunk(
    tiles: TileList, chunk: Chunk, layer: LayerAttention, pages: torch.Tensor, queries: torch.Tensor
) -> Partial:
    groups, dim = layer.num_kv_heads, layer.head_dim
    num_items, rows = len(chunk.tiles), tiles.rows
    key, value = _gather(pages, chunk.key_rows, layer)
    key = key.view(num_items * groups, KEY_TILE, dim)
    value = value.view(num_items * groups, KEY_TILE, layer.value_width)
    query = queries.index_select(0, chunk.tiles).view(num_items * groups, rows, dim)
    scores = torch.bmm(query, key.transpose(1, 2))
    if layer.soft_cap is not None:
        scores = scores.div_(layer.soft_cap).tanh_().mul_(layer.soft_cap)
    if len(chunk.edges):
        by_item = scores.view(num_items, groups, rows, KEY_TILE)
        by_item.index_copy_(0, chunk.edges, by_item.index_select(0, chunk.edges).add_(chunk.edge_bias))
    weights = torch.softmax(scores, dim=-1)
    # The largest weight is exp(0) / sum: its inverse is the sum of exponentials, without another pass of exp.
    total = weights.amax(-1, keepdim=True).reciprocal_()
    shape = (num_items, groups, rows, -1)
    return (
        scores.amax(-1, keepdim=True).view(shape),
        total.view(shape),
        torch.bmm(weights, value).mul_(total).view(shape),
    )


def _gather(pages: torch.Tensor, key_rows: torch.Tensor, layer: LayerAttention) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of some rows for all heads, float32: [items, groups, KEY_TILE, width], flattened except for
    width."""
    vectors, groups = pages.view(-1, pages.shape[-1]), layer.num_kv_heads
    heads = torch.arange(groups)[:, None]
    if pages.dim() < 5:
        block_size = pages.shape[1]
        slots = key_rows - key_rows.div(2 * block_size, rounding_mode="floor") * block_size
        both = vectors.index_select(0, (slots * groups + heads).view(-1)).float()
        if pages.dim() == 3:
            return both[:, : layer.head_dim].contiguous(), both[:, : layer.value_width].contiguous()
        return both[:, : layer.head_dim].contiguous(), both[:, layer.head_dim :].contiguous()
    index = (key_rows * groups + heads).view(-1)
    # A value lies block_size rows after its key: use the same index on a view that starts there.
    values = vectors[pages.shape[2] * groups :].index_select(0, index)
    return vectors.index_select(0, index).float(), values.float()


def _merged(left: Partial, right: Partial) -> Partial:
    """Softmax over the keys of both parts. Merging an empty part changes no bit."""
    maximum = torch.maximum(left[0], right[0])
    left_scale, right_scale = torch.exp(left[0] - maximum), torch.exp(right[0] - maximum)
    return (
        maximum,
        left[1] * left_scale + right[1] * right_scale,
        left[2] * left_scale + right[2] * right_scale,
    )


def _select(partial: Partial, index: torch.Tensor) -> Partial:
    return (
        partial[0].index_select(0, index),
        partial[1].index_select(0, index),
        partial[2].index_select(0, index),
    )


def _store(target: Partial, index: torch.Tensor, values: Partial) -> None:
    for whole, part in zip(target, values, strict=True):
        whole.index_copy_(0, index, part)
