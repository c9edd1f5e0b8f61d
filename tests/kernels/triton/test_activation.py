"""Activation functions against float64 and their plain twins."""

from __future__ import annotations

import math

import pytest
import torch

from quire.kernels.activation import ACTIVATIONS
from quire.kernels.triton.activation import KINDS, activation
from tests.kernels.triton.helpers import DTYPES, assert_near, random, spread_rows


def reference(name: str, x: torch.Tensor) -> torch.Tensor:
    """By its definition, float64."""
    wide = x.double()
    if name in ("silu", "swish"):
        return wide * torch.sigmoid(wide)
    if name == "relu":
        return torch.relu(wide)
    if name == "gelu":
        return 0.5 * wide * (1 + torch.erf(wide / math.sqrt(2)))
    if name == "quick_gelu":
        return wide * torch.sigmoid(1.702 * wide)
    return 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))


def test_every_activation_has_a_kernel() -> None:
    assert KINDS.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_against_float64(name: str, dtype: torch.dtype, device: torch.device) -> None:
    x = 4 * random(device, 3, 202, dtype=dtype)
    assert_near(activation(x, name, gated=False), reference(name, x), roundings=2)
    gate, up = x.chunk(2, dim=1)
    expected = reference(name, gate).to(dtype).double() * up.double()
    assert_near(activation(x, name, gated=True), expected, roundings=4, scale=4.0)


@pytest.mark.parametrize("gated", [False, True])
def test_like_its_plain_twin(gated: bool, device: torch.device) -> None:
    x = random(device, 2, 2600, dtype=torch.bfloat16)
    gate, up = x.chunk(2, dim=1)
    plain = ACTIVATIONS["silu"](gate) * up if gated else ACTIVATIONS["silu"](x)
    assert_near(activation(spread_rows(x, 5), "silu", gated=gated), plain.double(), roundings=3)


@pytest.mark.parametrize("name", sorted(set(ACTIVATIONS)))
def test_extremes(name: str, device: torch.device) -> None:
    x = torch.tensor([[-1e4, -200.0, -0.0, 200.0, 1e4, torch.inf, torch.nan]], device=device)
    result = activation(x, name, gated=False)[0].tolist()
    assert [abs(value) for value in result[:3]] == [0.0, 0.0, 0.0]
    assert result[3:6] == [200.0, 1e4, math.inf]
    assert math.isnan(result[6])


def test_no_rows(device: torch.device) -> None:
    assert activation(random(device, 0, 64), "silu", gated=True).shape == (0, 32)
