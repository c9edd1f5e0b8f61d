"""Matrix products whose rows do not depend on the number of rows (docs/decisions/0002-batch-invariance.md)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

ROWS = 16
"""Rows computed at a time. torch's CPU products order additions by their number; a fixed one gives each row the same
bits."""


def padded_rows(num_rows: int) -> int:
    """Row count, a multiple of ROWS, with which a product of `num_rows` rows is computed."""
    return -(-num_rows // ROWS) * ROWS


def row_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + b with the bits of row t from x[t] alone. x: [T, K], weight: [N, K], bias: [N] or None. Returns [T,
    N]."""
    num_rows = x.shape[0]
    missing = padded_rows(num_rows) - num_rows
    if missing:
        x = F.pad(x, (0, 0, 0, missing))
    if x.shape[0] == ROWS:
        return F.linear(x, weight, bias)[:num_rows]
    out = x.new_empty(x.shape[0], weight.shape[0])
    for piece, rows in zip(out.split(ROWS), x.split(ROWS), strict=True):
        piece.copy_(F.linear(rows, weight, bias))
    return out[:num_rows]


def row_head_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each head's columns times its matrix, the bits of row t from x[t] alone. x: [T, H * K], weight: [H, N, K].
    Returns [T, H * N]."""
    heads, width = weight.shape[:2]
    out = x.new_empty(x.shape[0], heads, width)
    for piece, rows in zip(out.split(ROWS), x.split(ROWS), strict=True):
        padded = F.pad(rows, (0, 0, 0, ROWS - rows.shape[0])).unflatten(1, (heads, -1))
        product = torch.bmm(padded.transpose(0, 1).contiguous(), weight.transpose(1, 2))
        piece.copy_(product[:, : rows.shape[0]].transpose(0, 1))
    return out.flatten(1)
