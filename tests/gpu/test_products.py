"""Products by a library that only a card has."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.triton.matmul import matmul
from quire.kernels.triton.quantized_product import MEDIUM, multiplies_by_library, quantized_matmul
from tests.kernels.triton.helpers import assert_near, random
from tests.kernels.triton.test_weight_formats import FORMATS, weights

pytestmark = pytest.mark.gpu(interpretable=False)


@pytest.mark.parametrize("m", [MEDIUM, 333])
def test_many_rows_of_e4m3_numbers(m: int, device: torch.device) -> None:
    matrix, _ = weights(device, 1, 4096, 1024, FORMATS["fp8"])
    x = random(device, m, 1024, dtype=torch.bfloat16)
    bias, residual = random(device, 4096, dtype=torch.bfloat16), random(device, m, 4096, dtype=torch.bfloat16, seed=5)
    assert multiplies_by_library(x, matrix)
    expected = matmul(x, matrix, bias, residual.clone(), rounds_activations=True)
    result = quantized_matmul(x, matrix, bias, residual, rounds_activations=True)
    assert_near(result, expected.double(), roundings=3.0, scale=16.0)
