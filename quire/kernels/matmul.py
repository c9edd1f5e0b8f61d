"""Matrix products whose rows do not depend on how many rows there are (docs/decisions/0002-batch-invariance.md)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

ROW_MULTIPLE = 8
"""torch's CPU matrix products pick another kernel, with another order of additions, for 1 to 7 left-over rows.
With row counts that are multiples of 8 every row gets the same bits whatever the count."""


def padded_rows(num_rows: int) -> int:
    """The row count that a product of `num_rows` rows is computed with."""
    return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE


def row_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x: [T, K], weight: [N, K], bias: [N] or None -> [T, N]. Row t depends on x[t] alone, bit by bit."""
    num_rows = x.shape[0]
    missing = padded_rows(num_rows) - num_rows
    if missing == 0:
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, missing)), weight, bias)[:num_rows]
