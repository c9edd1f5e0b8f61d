"""Conversion of a quantised matrix to floating point, for library products of many rows. Limit: memory bandwidth."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.float8 import widen_e4m3
from quire.kernels.triton.packed_codes import widen_e2m1
from quire.kernels.triton.runtime import blocks_of, launch, narrow
from quire.kernels.triton.weight_formats import E4M3, I4, I8, MXFP4, NVFP4, PAIRED, StoredMatrix, exponent

ROWS = 8
"""Rows of a matrix that one program widens."""
RUNS = 4
"""Runs of PAIRED columns per program."""


@triton.jit
def _widen_kernel(
    codes,
    scales,
    offsets,
    row_scales,
    out,
    n,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    ROUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    row = tl.minimum(rows, n - 1)[:, None]
    within = (rows < n)[:, None]
    NUM_GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP if GROUP > 0 else 1
    first = tl.program_id(0) * BLOCK
    HALVES: tl.constexpr = 2 if FORMAT >= I4 else 1
    at = tl.arange(0, BLOCK // HALVES)[None, :]
    for half in tl.static_range(HALVES):
        if FORMAT >= I4:
            columns = first + at // 32 * 64 + half * 32 + at % 32
            inside = columns < K
            pairs = tl.load(codes + row * ((K + 63) // 64 * 32) + first // 2 + at, mask=inside, other=0)
            code = (pairs >> (4 * half)) & 0xF
            wide = code.to(tl.float32) if FORMAT == I4 else widen_e2m1(code, tl.float32)
        else:
            columns = first + at
            inside = columns < K
            code = tl.load(codes + row * K + columns, mask=inside, other=0 if FORMAT == I8 else 0.0)
            wide = widen_e4m3(code, tl.float32) if FORMAT == E4M3 else code.to(tl.float32)
        group = columns // GROUP if GROUP > 0 else columns * 0
        scale = tl.load(scales + row * NUM_GROUPS + group, mask=inside, other=0)
        if FORMAT == MXFP4:
            wide = wide * exponent(scale)
        elif FORMAT == NVFP4:
            wide = wide * widen_e4m3(scale, tl.float32) * tl.load(row_scales + row)
        else:
            wide = wide * scale.to(tl.float32)
        if HAS_OFFSETS:
            wide += tl.load(offsets + row * NUM_GROUPS + group, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * K + columns, narrow(wide, out.dtype.element_ty), mask=inside & within)


def widen(matrix: StoredMatrix, dtype: torch.dtype) -> torch.Tensor:
    """[rows, columns] in dtype, rounded to nearest. matrix: one quantised matrix, not a stack."""
    _, n, k = matrix.shape
    out = torch.empty(n, k, dtype=dtype, device=matrix.codes.device)
    block = RUNS * PAIRED
    launch(
        _widen_kernel,
        (blocks_of(k, block), blocks_of(n, ROWS)),
        *matrix.tensors,
        out,
        n,
        **matrix.constants(rounds_activations=False),
        ROWS=ROWS,
        BLOCK=block,
        num_warps=4,
    )
    return out
