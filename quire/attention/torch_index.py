"""Indexer of sparse latent attention in torch: scores of keys, and the best of them. A score does not depend on the
step's rest."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from quire.attention.interface import AttentionBatch
from quire.attention.tiles import KEY_TILE
from quire.kernels.arguments import IndexShape
from quire.kernels.matmul import padded_rows


def slots_of(
    batch: AttentionBatch, group: int, sequence: int, positions: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Slots of a sequence's positions in a group's pages, int64."""
    blocks = batch.block_tables[group][sequence].long()[positions // block_size]
    return blocks * block_size + positions % block_size


def select_keys(
    index: IndexShape,
    batch: AttentionBatch,
    group: int,
    keys: torch.Tensor,
    block_size: int,
    inputs: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Positions of the keys that an indexer chooses for each token (`AttentionStep.select_keys`). keys: [slots, dim],
    the pool's, written. inputs: rotated queries [T, num_heads, dim] and head weights [T, num_heads]."""
    query, weights = inputs
    chosen = torch.zeros(len(query), index.top)
    starts = batch.query_start.tolist()
    for sequence, (first, end) in enumerate(pairwise(starts)):
        last = int(batch.start_positions[sequence]) + end - first
        if end == first or last <= index.top:
            continue
        positions = torch.arange(-(-last // KEY_TILE) * KEY_TILE).clamp_(max=last - 1)
        own = keys.index_select(0, slots_of(batch, group, sequence, positions, block_size)).float()
        tiles = own.view(-1, KEY_TILE, index.dim).transpose(1, 2)
        for token in range(max(first, end - (last - index.top)), end):
            count = last - (end - 1 - token)
            scores = _scores(tiles[: -(-count // KEY_TILE)], query[token].float(), weights[token].float() * index.scale)
            order = scores[:count].sort(descending=True, stable=True).indices[: index.top]
            chosen[token] = order.sort().values.float()
    return chosen


def _scores(tiles: torch.Tensor, query: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Scores of one token over tiles of keys [tiles, dim, KEY_TILE] -> [tiles * KEY_TILE]. query: [num_heads, dim];
    weights: [num_heads], scaled."""
    rows = F.pad(query, (0, 0, 0, padded_rows(len(query)) - len(query)))
    products = torch.bmm(rows.expand(len(tiles), -1, -1), tiles).relu_()
    total = products[:, 0] * weights[0]
    for head in range(1, len(query)):
        total = total + products[:, head] * weights[head]
    return total.flatten()
