"""Products with matrices of small numbers in the way that is fastest for a number of rows.

Limits: the weights' bytes for few rows; the tensor cores for many. So a row's last bits depend on the range that the
number of rows lies in; within the first range, where steps of decoding are, they do not. `matmul` is the same for all.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.kernels.triton.matmul import WIDE, Tiles, matmul, stored_tiles, tiled_product
from quire.kernels.triton.quantize_rows import round_rows
from quire.kernels.triton.skinny import SkinnyTiles, skinny_product
from quire.kernels.triton.weight_formats import E4M3, I4, PLAIN, StoredMatrix
from quire.kernels.triton.widen import widen

FEW = 32
"""Rows up to which K is cut into the same slices, so that bits do not depend on their number."""
SLICES = 8
MEDIUM = 128
"""Rows from which on tiles of 128 rows are worth it, and the time of widening a matrix of 4-bit numbers."""


def few_tiles(m: int) -> SkinnyTiles:
    """Of up to FEW rows. m: rows."""
    if m <= 16:
        return SkinnyTiles(16, 8 if m <= 8 else 16, SLICES, 64, 8, 4)
    return SkinnyTiles(32, 32, SLICES, 64, 8, 3)


def some_tiles(matrix: StoredMatrix, *, rounds_activations: bool) -> SkinnyTiles:
    """Between FEW and MEDIUM rows: Hopper's larger products, and a narrow matrix occupies a large card by splits."""
    block_k = 128 if rounds_activations else 64
    return SkinnyTiles(64, 64, 1, block_k, 4, 4, splits=4 if matrix.shape[1] <= WIDE else 1)


def many_tiles(tiles: Tiles, matrix: StoredMatrix) -> Tiles:
    """Of MEDIUM rows or more, both operands of 8 bits. tiles: of any number of rows."""
    if matrix.kind == E4M3.value:
        return Tiles(128, 128, tiles.block_k, 8, 3)
    return Tiles(128, 256, tiles.block_k, 8, 3)


def quantized_matmul(
    x: torch.Tensor,
    matrix: StoredMatrix,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    rounds_activations: bool = False,
) -> torch.Tensor:
    """As `matmul`. matrix: one, of small numbers.

    Many rows times a matrix of 4-bit numbers go through the matrix in x's dtype, which lives as long as this takes: a
    layer's largest matrix, 200 MB of an 8B model, once for all layers.
    """
    m, n = x.shape[0], matrix.shape[1]
    widened = matrix.kind >= I4.value and not rounds_activations
    if m >= MEDIUM and widened:
        weight = widen(matrix, x.dtype)
        if residual is None:
            return F.linear(x, weight, bias)
        return residual.addmm_(x, weight.t()) if bias is None else residual.add_(F.linear(x, weight, bias))
    if m == 0 or matrix.kind == PLAIN.value or x.dtype == torch.float32:
        return matmul(x, matrix, bias, residual, rounds_activations=rounds_activations)
    out = x.new_empty(m, n) if residual is None else residual
    rounded = round_rows(x, matrix) if rounds_activations else None
    if m < MEDIUM:
        tiles = few_tiles(m) if m <= FEW else some_tiles(matrix, rounds_activations=rounds_activations)
        skinny_product(x, rounded, matrix, bias, residual, out, tiles)
    else:
        larger = stored_tiles(matrix, x.dtype, rounds_activations=rounds_activations)
        if rounds_activations and matrix.kind < I4.value:
            larger = many_tiles(larger, matrix)
        tiled_product(x, rounded, matrix, bias, residual, out, larger)
    return out
