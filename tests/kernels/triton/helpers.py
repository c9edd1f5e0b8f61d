"""Random operands, and how far a result in some dtype may be from one in float64."""

from __future__ import annotations

import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def spread_rows(x: torch.Tensor, gap: int) -> torch.Tensor:
    """The same rows, `gap` elements of NaN between any two."""
    wide = torch.full((x.shape[0], x.shape[1] + gap), torch.nan, dtype=x.dtype, device=x.device)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def assert_near(actual: torch.Tensor, expected: torch.Tensor, *, roundings: float = 1.0, scale: float = 1.0) -> None:
    """expected: float64. roundings: how many roundings to actual's dtype lie between, each of half a unit in the last
    place of the value, or of `scale` where values are smaller than that."""
    assert expected.dtype == torch.float64
    unit = max(torch.finfo(actual.dtype).eps, 2**-20)
    torch.testing.assert_close(
        actual.double(), expected, rtol=0.51 * unit * roundings, atol=0.51 * unit * roundings * scale
    )
