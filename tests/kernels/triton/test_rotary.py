"""cos and sin of positions against float64."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.triton.rotary import rotation_angles


@pytest.mark.parametrize("half", [1, 6, 10, 64])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_against_float64(half: int, dtype: torch.dtype, device: torch.device) -> None:
    positions = torch.tensor([0, 1, 5, 100, 4095, 131071] * 3 + [17], dtype=dtype, device=device)
    frequencies = (1.0 / 10000.0 ** (torch.arange(half) / half)).to(device)
    cos, sin = rotation_angles(positions, frequencies, 0.75)
    assert cos.shape == sin.shape == (19, half)
    assert cos.dtype == sin.dtype == torch.float32
    # The angle itself is a float32 product, as in the plain twin.
    angles = (positions[:, None].float() * frequencies).double()
    torch.testing.assert_close(cos.double(), angles.cos() * 0.75, rtol=0, atol=3e-7)
    torch.testing.assert_close(sin.double(), angles.sin() * 0.75, rtol=0, atol=3e-7)


def test_no_positions(device: torch.device) -> None:
    cos, sin = rotation_angles(torch.empty(0, dtype=torch.int64, device=device), torch.ones(4, device=device), 1.0)
    assert cos.shape == sin.shape == (0, 4)
