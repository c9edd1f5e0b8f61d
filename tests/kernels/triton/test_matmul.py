"""The batch-invariant product against float64, and its rows alone and among others."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.triton.matmul import matmul
from tests.kernels.triton.helpers import DTYPES, assert_near, random, spread_rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 16), (3, 70, 100), (65, 130, 48), (70, 9, 129)])
def test_against_float64(dtype: torch.dtype, m: int, n: int, k: int, device: torch.device) -> None:
    x = spread_rows(random(device, m, k, dtype=dtype), 7)
    weight = (random(device, n, k, seed=1) * k**-0.5).to(dtype)
    bias = random(device, n, dtype=dtype)
    expected = x.double() @ weight.double().T
    assert_near(matmul(x, weight), expected, roundings=1.1, scale=4.0)
    assert_near(matmul(x, weight, bias), expected + bias.double(), roundings=1.1, scale=4.0)
    residual = spread_rows(random(device, m, n, dtype=dtype, seed=2), 5)
    summed = expected + bias.double() + residual.double()
    result = matmul(x, weight, bias, residual)
    assert result.data_ptr() == residual.data_ptr()
    assert_near(result, summed, roundings=1.1, scale=4.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_than_one_group_of_tiles(dtype: torch.dtype, device: torch.device) -> None:
    """Every tile is computed by one program, whichever the order of programs."""
    x, weight = random(device, 64 * 9 + 1, 8, dtype=dtype), random(device, 150, 8, dtype=dtype)
    assert_near(matmul(x, weight), x.double() @ weight.double().T, roundings=1.1, scale=8.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = random(device, 80, 100, dtype=dtype), random(device, 40, 100, dtype=dtype)
    together = matmul(x, weight)
    for first, last in [(0, 1), (0, 17), (0, 79), (64, 80)]:
        assert torch.equal(matmul(x[first:last], weight), together[first:last])


def test_what_is_not_finite_stays_in_its_row(device: torch.device) -> None:
    x, weight = random(device, 5, 40), random(device, 12, 40)
    clean = matmul(x, weight)
    x[2, 3] = torch.nan
    result = matmul(x, weight)
    assert result[2].isnan().all()
    assert torch.equal(result[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def test_no_rows(device: torch.device) -> None:
    assert matmul(random(device, 0, 16), random(device, 8, 16)).shape == (0, 8)
