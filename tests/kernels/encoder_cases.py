"""Attention in both directions, in float64: what every kernel of it is compared with."""

from __future__ import annotations

from itertools import accumulate

import torch

LENGTHS = [1, 70, 3, 130, 16, 64]
"""Shorter than a tile, a tile, and across tiles."""


def bounds(lengths: list[int]) -> torch.Tensor:
    """[S + 1] int64: where each sequence begins."""
    return torch.tensor([0, *accumulate(lengths)])


def random_qkv(lengths: list[int], num_heads: int, head_dim: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(lengths), 3 * num_heads * head_dim, generator=generator)


def rotations(lengths: list[int], head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the positions, [T, head_dim / 2] float32 each."""
    positions = torch.cat([torch.arange(length) for length in lengths]).float()
    angles = positions[:, None] / 100.0 ** (torch.arange(head_dim // 2) / (head_dim // 2))
    return angles.cos(), angles.sin()


def expected(
    qkv: torch.Tensor,
    lengths: list[int],
    num_heads: int,
    scale: float,
    window: int | None,
    turn: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """[T, num_heads * head_dim] float64."""
    heads = qkv.double().unflatten(1, (3, num_heads, -1))
    query, key, value = heads.unbind(1)
    if turn is not None:
        cos, sin = (part.double()[:, None] for part in turn)

        def turned(x: torch.Tensor) -> torch.Tensor:
            left, right = x.chunk(2, dim=-1)
            return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

        query, key = turned(query), turned(key)
    parts = []
    for q, k, v in zip(*(each.split(lengths) for each in (query, key, value)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        if window is not None:
            distance = (torch.arange(len(q))[:, None] - torch.arange(len(q))).abs()
            scores = scores.masked_fill(distance > window, -torch.inf)
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1))
    return torch.cat(parts)
