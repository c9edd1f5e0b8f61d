"""Reference functions that define the kernels; the torch back end also runs `norm`, `write_kv` and `copy_blocks`.
`paged_attention_dense` is for tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F

from quire.kernels.arguments import LayerAttention, NormWeights, first_seen


def norm(weights: NormWeights, x: torch.Tensor) -> torch.Tensor:
    """Normalise x, [..., size], over its last dimension, in x's dtype."""
    if weights.centred:
        return F.layer_norm(x, (weights.size,), weights.weight, weights.bias, weights.epsilon)
    wide = x.float()
    scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + weights.epsilon)
    scaled = (wide * scale).to(x.dtype if weights.weight is None else weights.weight.dtype)
    return scaled if weights.weight is None else (scaled * weights.weight).to(x.dtype)


def write_kv(pages: torch.Tensor, key_rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Store keys and values ([T, num_kv_heads, head_dim], any float dtype) in a layer's pages, [num_blocks, 2,
    block_size, num_kv_heads, head_dim], contiguous. key_rows: [T] int64, from `key_rows`."""
    block_size = pages.shape[2]
    rows = pages.view(-1, *pages.shape[3:])
    write_rows(rows, key_rows, key)
    write_rows(rows, key_rows + block_size, value)


def write_rows(rows: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    """rows[index] = values, in the rows' dtype. float8_e4m3fn saturates, and non-finite values become NaN."""
    if rows.dtype != torch.float8_e4m3fn:
        rows.index_copy_(0, index, values.to(rows.dtype))
        return
    largest = torch.finfo(rows.dtype).max
    kept = torch.where(values.isfinite(), values.clamp(-largest, largest), torch.nan).to(rows.dtype)
    # torch cannot index_copy float8 on a CPU; bytes work.
    rows.view(torch.uint8).index_copy_(0, index, kept.view(torch.uint8))


def key_rows(slots: torch.Tensor, block_size: int) -> torch.Tensor:
    """Row of each slot's key in pages viewed as [rows, heads, head_dim]; its value is `block_size` rows later. slots:
    [T] int64, block * block_size + offset."""
    return slots + slots.div(block_size, rounding_mode="floor") * block_size


def copy_blocks(pages: Iterable[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks by (source, destination) in every tensor of the pool; all sources are read first."""
    if not pairs:
        return
    sources, destinations = torch.tensor(pairs, dtype=torch.int64).unbind(1)
    for page in pages:
        page.index_copy_(0, destinations.to(page.device), page.index_select(0, sources.to(page.device)))


def paged_attention_dense(
    pages: torch.Tensor,
    block_table: torch.Tensor,
    query: torch.Tensor,
    start_position: int,
    layer: LayerAttention,
    last_seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """One sequence's attention over its pages, token by token, in query's dtype. block_table: [blocks] int. query: [n,
    num_heads, head_dim] from start_position on; their keys and values are written. last_seen: [n], see AttentionBatch.
    Returns [n, num_heads, value_width]."""
    length = start_position + query.shape[0]
    positions = torch.arange(length)
    if pages.dim() == 4:
        block_size = pages.shape[1]
        both = pages[block_table.long()[positions // block_size], positions % block_size].to(query.dtype)
        stored = both.split((layer.head_dim, layer.value_width), dim=-1)
    else:
        block_size = pages.shape[2]
        both = pages[block_table.long()[positions // block_size], :, positions % block_size].to(query.dtype)
        stored = both.unbind(1)
    own = start_position + torch.arange(query.shape[0])
    if layer.length_scale is not None:
        query = query * layer.length_scale.factors(own).to(query.dtype)[:, None, None]
    group = layer.num_heads // layer.num_kv_heads
    scales = layer.cache_scale.key, layer.cache_scale.value
    key, value = (each.repeat_interleave(group, dim=1) * by for each, by in zip(stored, scales, strict=True))
    scores = torch.einsum("nhd,lhd->hnl", query, key) * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    hidden = positions[None] > (own if last_seen is None else last_seen)[:, None]
    if layer.window is not None:
        hidden |= positions[None] < first_seen(own, layer.window, is_chunked=layer.is_chunked)[:, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    if layer.sinks is not None:
        sinks = layer.sinks.to(query.dtype)[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :length]
    return torch.einsum("hnl,lhd->nhd", weights, value)
