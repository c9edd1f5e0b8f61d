"""Each way to multiply with a quantised matrix, chosen by the number of rows, against float64."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.triton.quantized_product import FEW, MEDIUM, quantized_matmul
from quire.kernels.triton.runtime import recorded_launches
from quire.kernels.triton.widen import widen
from tests.kernels.triton.helpers import DTYPES, assert_near, random, spread_rows
from tests.kernels.triton.test_weight_formats import FORMATS, float8_blocks, weights

MAKES = {**FORMATS, "fp8 in blocks": float8_blocks(64)}


class Names:
    """Notes launches in place of making them."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def launch(self, kernel: object, *_: object) -> None:
        self.names.append(kernel.__name__.strip("_"))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("m", [1, 12, FEW, FEW + 1, MEDIUM])
def test_products(name: str, m: int, device: torch.device) -> None:
    columns = 96 if "int" in name else 104
    matrix, meaning = weights(device, 1, 70, columns, MAKES[name])
    x = spread_rows(random(device, m, columns, dtype=torch.bfloat16), 3)
    bias, residual = random(device, 70, dtype=torch.bfloat16), random(device, m, 70, dtype=torch.bfloat16, seed=5)
    expected = x.double() @ meaning[0].T
    # A widened weight is rounded once more, and the library rounds before the residual is added.
    widened = m >= MEDIUM and matrix.kind >= 3
    roundings = 3.0 if widened else 1.1
    assert_near(quantized_matmul(x, matrix), expected, roundings=roundings, scale=8.0)
    summed = expected + bias.double() + residual.double()
    result = quantized_matmul(x, matrix, bias, residual)
    assert result.data_ptr() == residual.data_ptr()
    assert_near(result, summed, roundings=roundings, scale=8.0)


@pytest.mark.parametrize("name", ["fp8", "fp8 in blocks", "int8", "int4"])
def test_products_of_rounded_rows_are_those_of_every_range(name: str, device: torch.device) -> None:
    matrix, _ = weights(device, 1, 40, 192, MAKES[name])
    x = random(device, MEDIUM, 192, dtype=torch.bfloat16)
    together = quantized_matmul(x, matrix, rounds_activations=True)
    for m in (1, FEW, FEW + 1):
        alone = quantized_matmul(x[:m], matrix, rounds_activations=True)
        assert_near(alone, together[:m].double(), roundings=1.1, scale=4.0)


@pytest.mark.parametrize("name", MAKES)
def test_few_rows_have_the_same_bits_however_many_there_are(name: str, device: torch.device) -> None:
    columns = 608 if "int" in name else 600
    matrix, _ = weights(device, 1, 33, columns, MAKES[name])
    x = random(device, FEW, columns, dtype=torch.bfloat16)
    together = quantized_matmul(x, matrix)
    for m in (1, 8, 9, 16, 17):
        assert torch.equal(quantized_matmul(x[:m], matrix), together[:m])


@pytest.mark.parametrize(
    ("name", "m", "rounds", "kernels"),
    [
        ("int4", FEW, False, ["skinny_kernel"]),
        ("int4", FEW + 1, False, ["skinny_kernel", "sum_kernel"]),
        ("int4", MEDIUM, False, ["widen_kernel"]),
        ("int4", MEDIUM, True, ["round_integers_kernel", "matmul_kernel"]),
        ("fp8", FEW, True, ["round_kernel", "skinny_kernel"]),
        ("fp8", FEW + 1, True, ["round_kernel", "skinny_kernel", "sum_kernel"]),
        ("fp8", MEDIUM, True, ["round_kernel", "matmul_kernel"]),
        ("fp8", FEW, False, ["skinny_kernel"]),
        ("fp8", MEDIUM, False, ["matmul_kernel"]),
    ],
)
def test_kernels_by_the_number_of_rows(
    name: str, m: int, rounds: bool, kernels: list[str], device: torch.device
) -> None:
    matrix, _ = weights(device, 1, 40, 64, MAKES[name])
    noted = Names()
    with recorded_launches(noted):
        quantized_matmul(random(device, m, 64, dtype=torch.bfloat16), matrix, rounds_activations=rounds)
    assert noted.names == kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MAKES)
def test_widened_matrices(name: str, dtype: torch.dtype, device: torch.device) -> None:
    columns = 96 if "int" in name else 104
    matrix, meaning = weights(device, 1, 70, columns, MAKES[name])
    result = widen(matrix, dtype)
    assert result.shape == (70, columns)
    assert_near(result, meaning[0], roundings=1.1)
