"""Products of few rows with quantised matrices. Matrix rows are the tensor cores' rows, rows of x
their columns (at least 8). Warps have slices of K, added in one order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.triton.float8 import widen_e4m3
from quire.kernels.triton.packed_codes import halves_as_e2m1, halves_as_integers, ones_beside, widen_e2m1, words_of_e4m3
from quire.kernels.triton.quantize_rows import RoundedRows
from quire.kernels.triton.runtime import INTERPRETED, blocks_of, bound, dot, launch, narrow
from quire.kernels.triton.weight_formats import E4M3, I4, I8, MXFP4, NVFP4, PAIRED, PLAIN, StoredMatrix, exponent

TYPES: Mapping[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
SUMMED = 512
"""Output columns in which one program adds up the splits of K."""


@dataclass(frozen=True, slots=True)
class SkinnyTiles:
    """Tiles of a product of few rows. rows, block_m: rows of the matrix and of x per program. slices: parts of K
    multiplied at once, block_k columns each, or as many as divide a group of scales; PAIRED in paired formats. splits:
    programs that share K, whose sums another kernel adds."""

    rows: int
    block_m: int
    slices: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1


@triton.jit
def _multiply(w, x, accumulator, ROUNDED: tl.constexpr):
    if accumulator.dtype == tl.int32:
        total = tl.dot(w, x, accumulator, out_dtype=tl.int32)
    elif not ROUNDED:
        total = dot(w, x, accumulator)
    elif INTERPRETED:
        total = dot(widen_e4m3(w, tl.float32), widen_e4m3(x, tl.float32), accumulator)
    else:
        # Hopper adds at less than float32's precision.
        PARTIAL: tl.constexpr = 128 if w.shape[-1] > 128 else w.shape[-1]
        total = tl.dot(w, x, accumulator, max_num_imprecise_acc=PARTIAL)
    return total


@triton.jit
def _zeros(SLICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr):
    if SLICES == 1:
        zeros = tl.zeros((ROWS, COLUMNS), DTYPE)
    else:
        zeros = tl.zeros((SLICES, ROWS, COLUMNS), DTYPE)
    return zeros


@triton.jit
def _scale(at, column, K: tl.constexpr, GROUP: tl.constexpr, FORMAT: tl.constexpr):
    """[slices, rows]: scales of a column's group. at: [rows], pointers to the rows' first scales. column: [slices,
    1]."""
    scale = tl.load(at + column // GROUP, mask=column < K, other=0)
    return exponent(scale) if FORMAT == MXFP4 else scale.to(tl.float32)


@triton.jit
def _scales(
    scale_at,
    offset_at,
    column,
    PART: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
):
    """Scales and offsets of a step's groups, [slices, rows] each, of the low and high nibbles; 0 if absent."""
    scale, scale_2, offset, offset_2 = 0, 0, 0, 0
    if GROUP > 0 and FORMAT != NVFP4:
        scale = _scale(scale_at, column, K, GROUP, FORMAT)
        if HAS_OFFSETS:
            offset = _scale(offset_at, column, K, GROUP, PLAIN)
        if FORMAT >= I4 and GROUP % (2 * PART) != 0:
            scale_2 = _scale(scale_at, column + PART, K, GROUP, FORMAT)
            if HAS_OFFSETS:
                offset_2 = _scale(offset_at, column + PART, K, GROUP, PLAIN)
    return scale, scale_2, offset, offset_2


@triton.jit
def _inputs(
    from_x,
    columns,
    present,
    K: tl.constexpr,
    PART: tl.constexpr,
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """[slices, columns, rows] of x: for pairs, inputs of the low and of the high nibbles; else the same twice."""
    NOTHING: tl.constexpr = 0 if WHOLE else 0.0
    a = tl.load(from_x, mask=tl.expand_dims((columns < K) | EVEN, -1) & present, other=NOTHING)
    b = a
    if PAIRS:
        b = tl.load(from_x + PART, mask=tl.expand_dims((columns + PART < K) | EVEN, -1) & present, other=NOTHING)
    return a, b


@triton.jit
def _stored(
    from_row,
    scale_at,
    columns,
    first,
    DTYPE: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ROUNDED: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Three tiles, [slices, rows, columns]: codes, low nibbles (or all) in DTYPE, high ones. columns: [slices,
    columns]; first: [slices, 1]. EVEN: K ends with a step."""
    inside = tl.expand_dims((columns < K) | EVEN, -2)
    if FORMAT < I4:
        w = tl.load(from_row, mask=inside, other=0 if FORMAT == I8 else 0.0)
        low = w
        if FORMAT == E4M3 and not ROUNDED:
            low = words_of_e4m3(w, DTYPE)
        if FORMAT == I8 and not ROUNDED:
            low = w.to(tl.float32).to(DTYPE)
        high = low
    else:
        # Rows are stored in whole runs.
        w = tl.load(from_row, mask=tl.expand_dims((first + tl.zeros_like(columns) < K) | EVEN, -2), other=0)
        if FORMAT == I4:
            low, high = halves_as_integers(w, DTYPE)
        elif FORMAT == MXFP4:
            low, high = halves_as_e2m1(w, DTYPE)
        else:
            # The product is exact: its factors have two and four significant bits.
            at = scale_at[:, None] + tl.expand_dims(columns // GROUP, -2)
            of_group = tl.load(at, mask=inside, other=0)
            low = (widen_e2m1(w & 0xF, tl.float16) * widen_e4m3(of_group, tl.float16)).to(DTYPE)
            of_group = tl.load(at + 32 // GROUP, mask=tl.expand_dims((columns + 32 < K) | EVEN, -2), other=0)
            high = (widen_e2m1(w >> 4, tl.float16) * widen_e4m3(of_group, tl.float16)).to(DTYPE)
    return w, low, high


@triton.jit
def _add_scaled(total, part, scale):
    return tl.fma(part.to(tl.float32), tl.broadcast_to(tl.expand_dims(scale, -1), part.shape), total)


@triton.jit
def _add_group(total, w, x, ones, of_x, scale, offset, zeros, HAS_OFFSETS: tl.constexpr, ROUNDED: tl.constexpr):
    """total + (w @ x) * scale * of_x + (ones @ x) * offset. of_x: scales of e4m3 rows, else 1."""
    part = _multiply(w, x, zeros, ROUNDED)
    if ROUNDED and part.dtype != tl.int32:
        part = part * of_x
    total = _add_scaled(total, part, scale)
    if HAS_OFFSETS:
        total = _add_scaled(total, _multiply(ones, x, zeros, ROUNDED), offset)
    return total


@triton.jit
def _add_step(
    total,
    sums,
    zeros,
    low,
    high,
    ones,
    a,
    b,
    of_x,
    scales,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    ROUNDED: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """total + low @ a, + high @ b for pairs; sums: running, of x, for row offsets. scales: from `_scales`."""
    PAIRS: tl.constexpr = FORMAT >= I4
    scale, scale_2, offset, offset_2 = scales
    if GROUP == 0 or FORMAT == NVFP4:
        total = _multiply(low, a, total, ROUNDED)
        if PAIRS:
            total = _multiply(high, b, total, ROUNDED)
        if HAS_OFFSETS:
            sums = _multiply(ones, a, sums, ROUNDED)
            if PAIRS:
                sums = _multiply(ones, b, sums, ROUNDED)
    elif PAIRS and GROUP % BLOCK_K == 0:
        total = _add_scaled(total, _multiply(high, b, _multiply(low, a, zeros, ROUNDED), ROUNDED), scale)
        if HAS_OFFSETS:
            total = _add_scaled(total, _multiply(ones, b, _multiply(ones, a, zeros, ROUNDED), ROUNDED), offset)
    else:
        total = _add_group(total, low, a, ones, of_x, scale, offset, zeros, HAS_OFFSETS, ROUNDED)
        if PAIRS:
            total = _add_group(total, high, b, ones, of_x, scale_2, offset_2, zeros, HAS_OFFSETS, ROUNDED)
    return total, sums


@triton.jit
def _scaled_rows(result, of_row, scale_at, offset_at, HAS_OFFSETS: tl.constexpr):
    """result, [rows, columns], times a scale per row, plus of_row times an offset per row."""
    scaled = result.to(tl.float32) * tl.load(scale_at).to(tl.float32)[:, None]
    if HAS_OFFSETS:
        scaled = scaled + of_row.to(tl.float32) * tl.load(offset_at).to(tl.float32)[:, None]
    return scaled


@triton.jit
def _columns(SLICES: tl.constexpr, PART: tl.constexpr, BLOCK_K: tl.constexpr):
    """Column numbers of a step over K: the first of each slice, and all (paired formats: low nibbles')."""
    if SLICES == 1:
        first = 0
        columns = tl.arange(0, PART)
    else:
        first = (tl.arange(0, SLICES) * BLOCK_K)[:, None]
        columns = first + tl.arange(0, PART)[None, :]
    return first, columns


@triton.jit
def _bounds(K: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr):
    """First column of K of this program's split, and its end."""
    LENGTH: tl.constexpr = (K + STEP * SPLITS - 1) // (STEP * SPLITS) * STEP
    begin, end = 0, K
    if SPLITS > 1:
        begin = tl.program_id(2) * LENGTH
        end = tl.minimum(begin + LENGTH, K)
    return begin, end


@triton.jit
def _store(result, out, bias, residual, columns, tokens, m, n, stride, HAS_BIAS, HAS_RESIDUAL, DTYPE: tl.constexpr):
    """Add bias and residual, convert to DTYPE and store. result: [rows of the matrix, rows of x]."""
    within = columns < n
    inside = within[:, None] & (tokens < m)[None, :]
    to = tokens.to(tl.int64)[None, :] * stride + columns[:, None]
    if HAS_BIAS:
        result += tl.load(bias + columns, mask=within, other=0.0).to(tl.float32)[:, None]
    if HAS_RESIDUAL:
        result += tl.load(residual + to, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + to, narrow(result, DTYPE), mask=inside)


@triton.jit(do_not_specialize=["m"])
def _skinny_kernel(
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
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    ROUNDED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Kernel of `skinny_product`. Program (rows of the matrix, rows of x, split). With splits `out` is [splits, m,
    n]."""
    PAIRS: tl.constexpr = FORMAT >= I4
    PART: tl.constexpr = BLOCK_K // 2 if PAIRS else BLOCK_K
    WHOLE: tl.constexpr = ROUNDED and FORMAT != E4M3
    GROUPED: tl.constexpr = GROUP > 0 and FORMAT != NVFP4
    NUM_GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP if GROUP > 0 else 1
    WIDE: tl.constexpr = tl.int8 if WHOLE else DTYPE
    STEP: tl.constexpr = SLICES * BLOCK_K
    EVEN: tl.constexpr = K % STEP == 0
    columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(columns, n - 1).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = tl.minimum(tokens, m - 1).to(tl.int64)
    first, ks = _columns(SLICES, PART, BLOCK_K)
    from_x = x + token * x_stride + tl.expand_dims(ks, -1)
    from_row = codes + (row * ((K + 63) // 64 * 32 if PAIRS else K))[:, None]
    from_row += tl.expand_dims(ks - first // 2 if PAIRS else ks, -2)
    scale_at = scales + row * NUM_GROUPS
    offset_at = offsets + row * NUM_GROUPS if HAS_OFFSETS else row
    x_scale_at = x_scales + token * x_scale_stride if ROUNDED else token
    zeros = _zeros(SLICES, ROWS, BLOCK_M, tl.int32 if WHOLE else tl.float32)
    total = _zeros(SLICES, ROWS, BLOCK_M, tl.float32 if GROUPED or not WHOLE else tl.int32)
    sums = zeros
    begin, end = _bounds(K, STEP, SPLITS)
    ahead = _scales(scale_at, offset_at, begin + first, PART, K, FORMAT, GROUP, HAS_OFFSETS)
    for start in range(bound(begin), bound(end), STEP):
        # Scales of the next step load while this one is computed.
        now, column = ahead, start + first
        ahead = _scales(scale_at, offset_at, column + STEP, PART, K, FORMAT, GROUP, HAS_OFFSETS)
        a, b = _inputs(from_x + start, start + ks, tokens < m, K, PART, PAIRS, EVEN, WHOLE)
        at = from_row + (start // 2 if PAIRS else start)
        w, low, high = _stored(at, scale_at, start + ks, column, WIDE, K, FORMAT, GROUP, ROUNDED, EVEN)
        ones = ones_beside(w, WIDE) if HAS_OFFSETS else w
        of_x = column
        if GROUPED and ROUNDED and not WHOLE:
            of_x = tl.expand_dims(_scale(x_scale_at, column, K, GROUP, PLAIN), -2)
        total, sums = _add_step(
            total, sums, zeros, low, high, ones, a, b, of_x, now, FORMAT, GROUP, HAS_OFFSETS, ROUNDED, BLOCK_K
        )
    result = total if SLICES == 1 else tl.sum(total, 0)
    if not GROUPED:
        of_row = sums if SLICES == 1 else tl.sum(sums, 0)
        factor = row_scales + row if FORMAT == NVFP4 else scales + row
        result = _scaled_rows(result, of_row, factor, offsets + row if HAS_OFFSETS else row, HAS_OFFSETS)
    if ROUNDED and (WHOLE or not GROUPED):
        result = result * tl.load(x_scale_at)[None, :]
    if SPLITS > 1:
        out += tl.program_id(2).to(tl.int64) * m * out_stride
    _store(result, out, bias, residual, columns, tokens, m, n, out_stride, HAS_BIAS, HAS_RESIDUAL, out.dtype.element_ty)


@triton.jit(do_not_specialize=["m"])
def _sum_kernel(
    partial,
    bias,
    residual,
    out,
    m,
    n,
    out_stride,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the splits in order, bias and residual too. Program (columns, row)."""
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = columns < n
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial + (split * m + row) * n + columns, mask=within, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=within, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + row * out_stride + columns, mask=within, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, narrow(total, out.dtype.element_ty), mask=within)


def skinny_product(
    x: torch.Tensor,
    rounded: RoundedRows | None,
    matrix: StoredMatrix,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    tiles: SkinnyTiles,
) -> None:
    """Product of few rows with a quantised matrix (`matmul`), written to `out`. x: [M, K]; rounded: x rounded, or None.
    matrix: one, not a stack."""
    m, n = x.shape[0], matrix.shape[1]
    source, scales = (x, None) if rounded is None else (rounded.codes, rounded.scales)
    paired, group = matrix.kind >= I4.value, matrix.group_size
    block_k = PAIRED if paired else tiles.block_k if group == 0 else math.gcd(tiles.block_k, group)
    split = tiles.splits > 1
    to = torch.empty(tiles.splits, m, n, dtype=torch.float32, device=x.device) if split else out
    launch(
        _skinny_kernel,
        (blocks_of(n, tiles.rows), blocks_of(m, tiles.block_m), tiles.splits),
        source,
        scales,
        *matrix.tensors,
        None if split else bias,
        None if split else residual,
        to,
        m,
        n,
        source.stride(0),
        0 if scales is None else scales.stride(0),
        n if split else out.stride(0),
        **matrix.constants(rounds_activations=rounded is not None),
        HAS_BIAS=bias is not None and not split,
        HAS_RESIDUAL=residual is not None and not split,
        DTYPE=TYPES[x.dtype],
        ROWS=tiles.rows,
        BLOCK_M=tiles.block_m,
        SLICES=tiles.slices,
        BLOCK_K=block_k,
        SPLITS=tiles.splits,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if split:
        launch(
            _sum_kernel,
            (blocks_of(n, SUMMED), m),
            to,
            bias,
            residual,
            out,
            m,
            n,
            out.stride(0),
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            SPLITS=tiles.splits,
            BLOCK=SUMMED,
            num_warps=4,
        )
