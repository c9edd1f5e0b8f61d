"""Products of few rows against float64 over what the formats mean, in every way that K is cut."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.triton.quantize_rows import round_rows
from quire.kernels.triton.skinny import SkinnyTiles, skinny_product
from quire.kernels.triton.weight_formats import StoredMatrix
from tests.kernels.triton.helpers import DTYPES, assert_near, random, spread_rows
from tests.kernels.triton.test_weight_formats import FORMATS, Make, float8_blocks, weights
from tests.long import one_in, pairs

TILES = [
    SkinnyTiles(16, 8, 2, 64, 4, 1),
    SkinnyTiles(32, 16, 1, 64, 4, 1),
    SkinnyTiles(16, 16, 4, 64, 8, 1),
    SkinnyTiles(32, 16, 1, 64, 4, 1, splits=3),
    SkinnyTiles(16, 8, 2, 32, 4, 1, splits=2),
]


def product(
    x: torch.Tensor,
    matrix: StoredMatrix,
    tiles: SkinnyTiles,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    rounds: bool = False,
) -> torch.Tensor:
    out = x.new_empty(x.shape[0], matrix.shape[1]) if residual is None else residual
    skinny_product(x, round_rows(x, matrix) if rounds else None, matrix, bias, residual, out, tiles)
    return out


@pytest.mark.parametrize(("tiles", "dtype", "name"), pairs(2, TILES, DTYPES, FORMATS))
def test_products_of_widened_weights(name: str, dtype: torch.dtype, tiles: SkinnyTiles, device: torch.device) -> None:
    make = FORMATS[name] if name != "fp8 in blocks" else float8_blocks(64)
    columns = 224 if "int" in name else 200
    matrix, meaning = weights(device, 1, 70, columns, make)
    x, bias = spread_rows(random(device, 19, columns, dtype=dtype), 3), random(device, 70, dtype=dtype)
    residual = random(device, 19, 70, dtype=dtype, seed=5)
    expected = x.double() @ meaning[0].T + bias.double() + residual.double()
    result = product(x, matrix, tiles, bias, residual.clone())
    assert_near(result, expected, roundings=1.1, scale=8.0)
    for first, last in [(0, 1), (7, 12)]:
        alone = product(x[first:last], matrix, tiles, bias, residual[first:last].clone())
        assert torch.equal(alone, result[first:last]), "a row has the same bits in any batch"


@pytest.mark.parametrize(
    ("tiles", "make"),
    one_in(3, TILES, [FORMATS[name] for name in ("fp8", "int8", "int8 with offsets", "int4")] + [float8_blocks(64)]),
)
def test_products_of_rounded_rows(make: Make, tiles: SkinnyTiles, device: torch.device) -> None:
    matrix, meaning = weights(device, 1, 40, 224, make)
    x = random(device, 9, 224, dtype=torch.bfloat16)
    rounded = round_rows(x, matrix)
    codes = rounded.codes if matrix.is_integer else rounded.codes.view(torch.uint8).cpu().view(torch.float8_e4m3fn)
    size = 224 if rounded.scales.shape[1] == 1 else matrix.group_size
    spread = rounded.scales.double().repeat_interleave(size, 1)[:, :224]
    wide = codes.to(device).double() * spread
    result = product(x, matrix, tiles, rounds=True)
    assert_near(result, wide @ meaning[0].T, roundings=1.2, scale=4.0)
    assert torch.equal(product(x[5:7], matrix, tiles, rounds=True), result[5:7])


def test_what_is_not_finite_stays_in_its_row(device: torch.device) -> None:
    matrix, _ = weights(device, 1, 40, 96, FORMATS["int4"])
    x = random(device, 5, 96)
    clean = product(x, matrix, TILES[0])
    x[2, 3] = torch.nan
    result = product(x, matrix, TILES[0])
    assert result[2].isnan().all()
    assert torch.equal(result[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
