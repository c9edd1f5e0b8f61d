"""Fastest product with quantised matrices for a number of rows. A row's last bits depend on the row count's range;
`matmul`'s do not."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.kernels.triton.matmul import WIDE, ProductTiles, matmul, stored_tiles, tiled_product
from quire.kernels.triton.quantize_rows import RoundedRows, round_rows
from quire.kernels.triton.skinny import SkinnyTiles, skinny_product
from quire.kernels.triton.weight_formats import E4M3, I4, PLAIN, StoredMatrix
from quire.kernels.triton.widen import widen

FEW = 16
"""Rows up to which products with 4-bit matrices split K into the same slices."""
SLICES = 8
MEDIUM = 128
"""Rows from which the matrix units bound a product, so widening a 4-bit matrix pays."""
COLUMNS = (16, 32, 64)
"""Rows of x per program; the smallest fitting one is used, and gives the same bits."""


def skinny_tiles(m: int, matrix: StoredMatrix, *, rounds_activations: bool) -> SkinnyTiles:
    """Tiles for fewer than MEDIUM rows, measured on an H200 with Qwen3-8B's matrices
    (`benchmarks.gpu.experiments --what products`)."""
    is_narrow = matrix.shape[1] <= WIDE
    if not rounds_activations and m <= FEW:
        if m > 8:
            return SkinnyTiles(32, 16, SLICES, 64, 8, 3)
        return SkinnyTiles(16, 8, SLICES, 64, 4, 4) if is_narrow else SkinnyTiles(32, 8, SLICES, 64, 4, 3)
    block_m = next((size for size in COLUMNS if m <= size), COLUMNS[-1])
    block_k, num_stages = (128, {16: 6, 32: 5, 64: 5}) if rounds_activations else (64, {16: 6, 32: 5, 64: 4})
    return SkinnyTiles(64, block_m, 1, block_k, 4, num_stages[block_m], splits=4 if is_narrow else 1)


def many_tiles(tiles: ProductTiles, matrix: StoredMatrix) -> ProductTiles:
    """Tiles for MEDIUM rows or more with both operands of 8 bits."""
    return tiles if matrix.kind == E4M3.value else ProductTiles(128, 256, tiles.block_k, 8, 3)


def multiplies_by_library(x: torch.Tensor, matrix: StoredMatrix) -> bool:
    """True if the library multiplies e4m3 operands with row scales: from capability 9.0 on, for bfloat16 results."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or matrix.codes.dtype != torch.float8_e4m3fn or matrix.group_size:
        return False
    _, n, k = matrix.shape
    return n % 16 == 0 and k % 16 == 0 and torch.cuda.get_device_capability(x.device) >= (9, 0)


def library_product(rounded: RoundedRows, matrix: StoredMatrix, dtype: torch.dtype) -> torch.Tensor:
    """Product of e4m3 rows and matrix: [M, N] of `dtype`, added in float32."""
    assert rounded.scales is not None, "e4m3 rows have scales"
    assert matrix.scales is not None, "a scale for each row"
    codes, scales = matrix.codes[0].t(), matrix.scales[0].t()
    out = torch._scaled_mm(rounded.codes, codes, rounded.scales, scales, out_dtype=dtype, use_fast_accum=False)
    assert isinstance(out, torch.Tensor)
    return out


def quantized_matmul(
    x: torch.Tensor,
    matrix: StoredMatrix,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    rounds_activations: bool = False,
) -> torch.Tensor:
    """Product with one quantised matrix (`matmul`). For many rows, 4-bit matrices are first widened to x's dtype."""
    m, n = x.shape[0], matrix.shape[1]
    widened = matrix.kind >= I4.value and not rounds_activations
    if m >= MEDIUM and widened:
        weight = widen(matrix, x.dtype)
        if residual is None:
            return F.linear(x, weight, bias)
        return residual.addmm_(x, weight.t()) if bias is None else residual.add_(F.linear(x, weight, bias))
    if m == 0 or matrix.kind == PLAIN.value or x.dtype == torch.float32:
        return matmul(x, matrix, bias, residual, rounds_activations=rounds_activations)
    rounded = round_rows(x, matrix) if rounds_activations else None
    if m >= MEDIUM and rounded is not None and multiplies_by_library(x, matrix):
        product = library_product(rounded, matrix, x.dtype)
        product = product if bias is None else product.add_(bias)
        return product if residual is None else residual.add_(product)
    out = x.new_empty(m, n) if residual is None else residual
    if m < MEDIUM:
        tiles = skinny_tiles(m, matrix, rounds_activations=rounds_activations)
        skinny_product(x, rounded, matrix, bias, residual, out, tiles)
    else:
        larger = stored_tiles(matrix, x.dtype, rounds_activations=rounds_activations)
        if rounds_activations and matrix.kind < I4.value:
            larger = many_tiles(larger, matrix)
        tiled_product(x, rounded, matrix, bias, residual, out, larger)
    return out
