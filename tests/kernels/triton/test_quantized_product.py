"""Each way to multiply with a quantised matrix, chosen by the number of rows, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.kernels.triton import quantized_product
from quire.kernels.triton.matmul import WIDE
from quire.kernels.triton.quantized_product import (
    FEW,
    MEDIUM,
    quantized_matmul,
    skinny_tiles,
)
from quire.kernels.triton.runtime import recorded_launches
from quire.kernels.triton.weight_formats import StoredMatrix
from quire.kernels.triton.widen import widen
from tests.kernels.triton.helpers import DTYPES, assert_near, random, spread_rows
from tests.kernels.triton.test_weight_formats import FORMATS, float8_blocks, weights
from tests.long import all_but_long, one_in

MAKES = {**FORMATS, "fp8 in blocks": float8_blocks(64)}


class Names:
    """Notes launches in place of making them."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def launch(self, kernel: object, *_: object) -> None:
        self.names.append(kernel.__name__.strip("_"))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "m"), one_in(3, MAKES, [1, 12, FEW, FEW + 1, 40, MEDIUM]))
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


@pytest.mark.parametrize("name", all_but_long(["fp8", "fp8 in blocks", "int8", "int4"], ["int8"]))
def test_products_of_rounded_rows_are_those_of_every_range(name: str, device: torch.device) -> None:
    """Below MEDIUM rows to the bit."""
    matrix, _ = weights(device, 1, 40, 192, MAKES[name])
    x = random(device, MEDIUM, 192, dtype=torch.bfloat16)
    together = quantized_matmul(x, matrix, rounds_activations=True)
    most = quantized_matmul(x[: MEDIUM - 1], matrix, rounds_activations=True)
    for m in (1, FEW, FEW + 1, 33):
        alone = quantized_matmul(x[:m], matrix, rounds_activations=True)
        assert torch.equal(alone, most[:m])
        assert_near(alone, together[:m].double(), roundings=1.1, scale=4.0)


@pytest.mark.parametrize("name", one_in(3, MAKES))
def test_rows_have_the_same_bits_however_many_there_are_in_a_range(name: str, device: torch.device) -> None:
    columns = 608 if "int" in name else 600
    matrix, _ = weights(device, 1, 33, columns, MAKES[name])
    x = random(device, MEDIUM - 1, columns, dtype=torch.bfloat16)
    few, some = quantized_matmul(x[:FEW], matrix), quantized_matmul(x, matrix)
    for m in (1, 8, 9):
        assert torch.equal(quantized_matmul(x[:m], matrix), few[:m])
    for m in (FEW + 1, 33):
        assert torch.equal(quantized_matmul(x[:m], matrix), some[:m])


def test_a_wide_matrix_is_not_split(device: torch.device) -> None:
    narrow, _ = weights(device, 1, 40, 64, MAKES["fp8"])
    wide = StoredMatrix(narrow.kind, 1, torch.empty(1, WIDE + 1, 1, dtype=narrow.codes.dtype, device=device))
    for m in (1, 17, 100):
        assert skinny_tiles(m, narrow, rounds_activations=True).splits == 4
        assert skinny_tiles(m, wide, rounds_activations=True).splits == 1


def test_products_of_the_library(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows of e4m3 numbers by row scales: what the library is given, with one that computes in float64."""
    stored, meaning = weights(device, 1, 48, 64, MAKES["fp8"])
    matrix = replace(stored, codes=stored.codes.view(torch.float8_e4m3fn))
    x = random(device, MEDIUM, 64, dtype=torch.bfloat16)
    bias, residual = random(device, 48, dtype=torch.bfloat16), random(device, MEDIUM, 48, dtype=torch.bfloat16, seed=5)

    def scaled(
        a: torch.Tensor,
        b: torch.Tensor,
        rows: torch.Tensor,
        columns: torch.Tensor,
        *,
        out_dtype: torch.dtype,
        **_: bool,
    ) -> torch.Tensor:
        assert rows.shape == (MEDIUM, 1)
        assert columns.shape == (1, 48)
        numbers = (each.contiguous().view(torch.uint8).view(torch.float8_e4m3fn).double() for each in (a, b))
        product = torch.mm(*numbers) * rows * columns
        return product.to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    monkeypatch.setattr(quantized_product, "multiplies_by_library", lambda *_: True)
    result = quantized_matmul(x, matrix, bias, residual.clone(), rounds_activations=True)
    assert_near(result, x.double() @ meaning[0].T + bias.double() + residual.double(), roundings=3.0, scale=40.0)


@pytest.mark.parametrize(
    ("name", "m", "rounds", "kernels"),
    [
        ("int4", FEW, False, ["skinny_kernel"]),
        ("int4", FEW + 1, False, ["skinny_kernel", "sum_kernel"]),
        ("int4", MEDIUM, False, ["widen_kernel"]),
        ("int4", MEDIUM, True, ["round_integers_kernel", "matmul_kernel"]),
        ("fp8", 1, True, ["round_kernel", "skinny_kernel", "sum_kernel"]),
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
