"""Attention of encoders in Triton: against float64, and rows that depend on their own sequence alone."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.triton.encoder_attention import attend_both_ways
from tests.kernels.encoder_cases import bounds, expected, random_qkv, rotations
from tests.kernels.triton.helpers import spread_rows

LENGTHS = [1, 70, 20]
SCALE = 0.3


@pytest.mark.parametrize(
    ("dtype", "head_dim", "window", "rotates"),
    [(torch.float32, 32, None, True), (torch.float32, 24, 5, False), (torch.bfloat16, 16, None, False)],
)
def test_against_float64(
    dtype: torch.dtype, head_dim: int, window: int | None, rotates: bool, device: torch.device
) -> None:
    qkv = random_qkv(LENGTHS, 2, head_dim).to(dtype)
    turn = rotations(LENGTHS, head_dim) if rotates else None
    on_device = None if turn is None else (turn[0].to(device), turn[1].to(device))
    starts = bounds(LENGTHS).int().to(device)
    found = attend_both_ways(spread_rows(qkv.to(device), 5), on_device, starts, 2, SCALE, window)
    reference = expected(qkv, LENGTHS, 2, SCALE, window, turn)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    assert float((found.cpu().double() - reference).abs().max()) < tolerance
    own = None if on_device is None else (on_device[0][1:71], on_device[1][1:71])
    alone = attend_both_ways(qkv[1:71].to(device), own, bounds([70]).int().to(device), 2, SCALE, window)
    assert torch.equal(alone, found[1:71]), "the other sequences have changed a bit"
