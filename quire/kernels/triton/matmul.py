"""Matrix products whose rows do not depend on their number: one tile size and order of additions over K. Without
`batch_invariant`, libraries multiply floating-point matrices. Quantised ones are widened in registers, or multiply
8-bit rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from quire.kernels.triton.quantize_rows import RoundedRows, round_rows
from quire.kernels.triton.runtime import blocks_of, launch, narrow
from quire.kernels.triton.weight_formats import I4, LEAST_K, PAIRED, PLAIN, StoredMatrix, product


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """Rows and columns of a program's result, and columns of K per step."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


GROUP_M = 8
"""Row tiles in a group, which shares a column of weights in the L2 cache."""
WIDE = 8192
"""Result width below which tiles are narrower, so one row of tiles still fills a large GPU."""


def tiles_for(num_columns: int, dtype: torch.dtype) -> ProductTiles:
    """Tiles by the matrix alone: 64 rows, and stages for 96 KiB of shared memory (capabilities 8.6 and 8.9)."""
    if dtype == torch.float32:
        return ProductTiles(block_m=64, block_n=64, block_k=32, num_warps=8, num_stages=3)
    if num_columns <= WIDE:
        return ProductTiles(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=5)
    return ProductTiles(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=4)


def stored_tiles(matrix: StoredMatrix, dtype: torch.dtype, *, rounds_activations: bool) -> ProductTiles:
    """Tiles of a stored matrix, by it alone. dtype: x's. A tile of K lies in one group of scales."""
    num_columns = matrix.shape[1]
    tiles = tiles_for(num_columns, dtype)
    if matrix.kind == PLAIN.value:
        return tiles
    if matrix.kind >= I4.value:
        # Matrices with offsets also need registers for sums of x.
        num_warps = tiles.num_warps if matrix.offsets is None else 8
        return replace(tiles, block_k=PAIRED, num_warps=num_warps, num_stages=3)
    wanted = 2 * PAIRED if rounds_activations else tiles.block_k
    block_k = wanted if matrix.group_size == 0 else math.gcd(wanted, matrix.group_size)
    assert block_k >= LEAST_K, "groups hold a whole tile"
    return replace(tiles, block_k=block_k, num_stages=min(tiles.num_stages, 4))


@triton.jit
def grouped(program, num_m, num_n, tiles):
    """Row and column of a program's tile: `tiles` rows of tiles at a time, column by column."""
    first_m = (program // (tiles * num_n)) * tiles
    group_m = tl.minimum(num_m - first_m, tiles)
    within = program % (tiles * num_n)
    return first_m + within % group_m, within // group_m


@triton.jit(do_not_specialize=["m"])
def _matmul_kernel(
    x,
    x_scales,
    codes,
    scales,
    offsets,
    row_scales,
    bias,
    residual,
    out,
    m,
    n,
    x_stride,
    x_scale_stride,
    out_stride,
    x_head_stride,
    out_head_stride,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    ROUNDED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
):
    """TILES: see GROUP_M."""
    program = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    x += head * x_head_stride
    out += head * out_head_stride
    tile_m, tile_n = grouped(program, tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), TILES)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside, column_inside = rows < m, columns < n
    # Rows and columns beyond the end repeat the last: nothing out of range is read, and they are not stored.
    row = tl.minimum(rows, m - 1).to(tl.int64)
    column = head * n + tl.minimum(columns, n - 1)
    accumulator = product(
        x + row * x_stride, x_scales + row * x_scale_stride if ROUNDED else row, row, codes, scales, offsets,
        row_scales, column, out.dtype.element_ty, K, FORMAT, GROUP, HAS_OFFSETS, ROUNDED, False, BLOCK_M, BLOCK_N,
        BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        accumulator += tl.load(bias + columns, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    inside = row_inside[:, None] & column_inside[None, :]
    if HAS_RESIDUAL:
        at = residual + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
        accumulator += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    to = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    tl.store(to, narrow(accumulator, out.dtype.element_ty), mask=inside)


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor | StoredMatrix,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    rounds_activations: bool = False,
) -> torch.Tensor:
    """residual + x W^T + bias, added in float32. x: [M, K], rows may be strided. weight: [N, K], contiguous, or stored.
    bias: [N] or None. residual: [M, N] or None; overwritten with the result. All of one dtype. rounds_activations:
    round x by `round_rows` and multiply 8-bit numbers, if the matrix can (`multiplies_bytes`). Returns [M, N]."""
    matrix = weight if isinstance(weight, StoredMatrix) else StoredMatrix.plain(weight)
    n = matrix.shape[1]
    out = torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device) if residual is None else residual
    if x.shape[0] > 0:
        rounded = round_rows(x, matrix) if rounds_activations else None
        _launch(x, rounded, matrix, bias, residual, out)
    return out


def head_matmul(x: torch.Tensor, weight: torch.Tensor | StoredMatrix) -> torch.Tensor:
    """Each head's columns times its matrix. x: [M, H * K]; weight: [H, N, K], contiguous, or stored. Returns [M, H *
    N]."""
    matrix = weight if isinstance(weight, StoredMatrix) else StoredMatrix.plain(weight)
    heads, n, _ = matrix.shape
    out = torch.empty(x.shape[0], heads * n, dtype=x.dtype, device=x.device)
    if x.shape[0] > 0:
        _launch(x, None, matrix, None, None, out)
    return out


def _launch(
    x: torch.Tensor,
    rounded: RoundedRows | None,
    matrix: StoredMatrix,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    tiles = stored_tiles(matrix, x.dtype, rounds_activations=rounded is not None)
    tiled_product(x, rounded, matrix, bias, residual, out, tiles)


def tiled_product(
    x: torch.Tensor,
    rounded: RoundedRows | None,
    matrix: StoredMatrix,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    tiles: ProductTiles,
) -> None:
    """Product of `matmul` or `head_matmul` into `out`. rounded: x rounded, or None."""
    m, (heads, n, k) = x.shape[0], matrix.shape
    assert x.stride(1) == out.stride(1) == 1, "the elements of a row lie side by side"
    source, scales = (x, None) if rounded is None else (rounded.codes, rounded.scales)
    launch(
        _matmul_kernel,
        (blocks_of(m, tiles.block_m) * blocks_of(n, tiles.block_n), heads),
        source,
        scales,
        *matrix.tensors,
        bias,
        residual,
        out,
        m,
        n,
        source.stride(0),
        0 if scales is None else scales.stride(0),
        out.stride(0),
        k,
        n,
        **matrix.constants(rounds_activations=rounded is not None),
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        TILES=GROUP_M,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
