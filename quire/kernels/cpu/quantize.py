"""Native search for the scales and offsets of 4-bit weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.envs import affinity_cores
from quire.kernels.cpu import _native

_MOST_THREADS = 8


def fit_int4(
    groups: torch.Tensor, shares: Sequence[float], nudges: Sequence[tuple[float, float]], *, isa: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Quantise groups of weights ([M, G] float32, G <= 128): values 0 to 15 ([M, G] uint8), and per group step, offset
    and mean of the values ([M, 1] float32 each); None for infinities or NaN. The rest: see
    `quire.quantization.quantize.fit_groups`. Uses all cores; groups are independent."""
    groups = groups.contiguous()
    if groups.dtype != torch.float32 or groups.dim() != 2:
        raise ValueError(f"groups: float32 [M, G] expected, got {groups.dtype} {list(groups.shape)}")
    count, size = groups.shape
    values = torch.empty(count, size, dtype=torch.uint8)
    steps, offsets, means = (torch.empty(count, 1) for _ in range(3))
    is_finite = _native.fit_int4(
        isa,
        groups.data_ptr(),
        count,
        size,
        shares,
        [number for nudge in nudges for number in nudge],
        *(each.data_ptr() for each in (values, steps, offsets, means)),
        threads=min(affinity_cores(), _MOST_THREADS),
    )
    return (values, steps, offsets, means) if is_finite else None
