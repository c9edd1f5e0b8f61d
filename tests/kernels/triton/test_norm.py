"""RMSNorm and LayerNorm against float64, and rows that depend on nothing but themselves."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.arguments import NormWeights
from quire.kernels.triton.norm import norm
from quire.layers.operations import TorchOperations
from tests.kernels.triton.helpers import DTYPES, assert_near, random, spread_rows

SIZES = [1, 48, 64, 576, 1000]


def reference(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float, centred: bool
) -> torch.Tensor:
    """In float64, but for the one rounding of RMSNorm before the weight."""
    wide = x.double()
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    scaled = wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt()
    if not centred:
        scaled = scaled.to(x.dtype).double()
    scaled = scaled if weight is None else scaled * weight.double()
    return scaled if bias is None else scaled + bias.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_against_float64(dtype: torch.dtype, size: int, centred: bool, device: torch.device) -> None:
    x = 3 * random(device, 3, size, dtype=dtype) + (0.5 if centred else 0.0)
    weight, bias = random(device, size, dtype=dtype), random(device, size, dtype=dtype, seed=1)
    epsilon = 1e-5
    result = norm(x, weight, bias if centred else None, epsilon, centred=centred)
    expected = reference(x, weight, bias if centred else None, epsilon, centred)
    assert_near(result, expected, roundings=3)
    bare = norm(x, None, None, epsilon, centred=centred)
    assert_near(bare, reference(x, None, None, epsilon, centred), roundings=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_of_float32_multiplies_what_is_not_rounded(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = 3 * random(device, 3, 100, dtype=dtype), random(device, 100, dtype=torch.float32)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    result = norm(x, weight, None, 1e-5, centred=False)
    assert_near(result, expected, roundings=1)
    plain = TorchOperations().norm(NormWeights(100, weight, None, 1e-5, centred=False), x)
    assert_near(plain, expected, roundings=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_a_residual_is_added_first_and_written_back(dtype: torch.dtype, centred: bool, device: torch.device) -> None:
    x, residual = random(device, 5, 100, dtype=dtype), random(device, 5, 100, dtype=dtype, seed=1)
    weight = random(device, 100, dtype=dtype)
    expected_sum = residual + x
    spread = spread_rows(residual, 9)
    result = norm(spread_rows(x, 3), weight, None, 1e-6, centred=centred, residual=spread)
    assert torch.equal(spread, expected_sum)
    assert_near(result, reference(expected_sum, weight, None, 1e-6, centred), roundings=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_like_its_plain_twin(dtype: torch.dtype, centred: bool, device: torch.device) -> None:
    x, weight = random(device, 7, 96, dtype=dtype), random(device, 96, dtype=dtype)
    weights = NormWeights(96, weight, weight if centred else None, 1e-6, centred)
    result = norm(x, weight, weights.bias, 1e-6, centred=centred)
    assert_near(result, TorchOperations().norm(weights, x).double(), roundings=3)


def test_a_row_has_the_same_bits_in_any_batch(device: torch.device) -> None:
    x, weight = random(device, 6, 200, dtype=torch.bfloat16), random(device, 200, dtype=torch.bfloat16)
    together = norm(x, weight, None, 1e-6, centred=False)
    for row in range(6):
        assert torch.equal(norm(x[row : row + 1], weight, None, 1e-6, centred=False)[0], together[row])


def test_what_is_not_finite_stays_in_its_row(device: torch.device) -> None:
    x = random(device, 4, 64)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    result = norm(x, None, None, 1e-6, centred=False)
    assert result.isnan().any(dim=1).tolist() == [False, True, True, False]


def test_no_rows(device: torch.device) -> None:
    assert norm(random(device, 0, 64), None, None, 1e-6, centred=True).shape == (0, 64)
