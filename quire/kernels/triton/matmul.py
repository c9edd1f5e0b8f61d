"""A matrix product whose rows do not depend on how many there are: one tile size, one order of additions over K.

Limits: the weights' bytes for few rows, 2 M N K operations on the tensor cores for many. Libraries pick another kernel,
split over K in another way, for another number of rows, and a row's last bits change with it; here one program adds up
each result from the first k to the last, in tiles that depend on the matrix alone. That costs speed, so it is what
`batch_invariant` asks for and not the default.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.runtime import blocks_of, dot, launch, narrow


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows and columns of the result that a program computes, and how much of K at once."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


GROUP_M = 8
"""Row tiles in a group; a group's tiles share a column of the weights while it is in the second-level cache."""
WIDE = 8192
"""Results that are narrower are cut finer, so that one row of tiles still fills most of a large GPU."""


def tiles_for(num_columns: int, dtype: torch.dtype) -> Tiles:
    """A function of the matrix alone. 64 rows are what the smallest product of Hopper's tensor cores takes. In 16 bits
    five stages of (64 + 64) * 64 elements are 80 KiB of shared memory, four of (64 + 128) * 64 are 96: what cards of
    compute capability 8.6 and 8.9 have at most."""
    if dtype == torch.float32:
        return Tiles(block_m=64, block_n=64, block_k=32, num_warps=8, num_stages=3)
    if num_columns <= WIDE:
        return Tiles(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=5)
    return Tiles(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=4)


@triton.jit(do_not_specialize=["m"])
def _matmul_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    m,
    n,
    x_stride,
    out_stride,
    x_head_stride,
    out_head_stride,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    program = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    x += head * x_head_stride
    weight += head * n * K
    out += head * out_head_stride
    num_m, num_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    first_m = (program // (GROUP * num_n)) * GROUP
    group_m = tl.minimum(num_m - first_m, GROUP)
    within = program % (GROUP * num_n)
    rows = (first_m + within % group_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (within // group_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside, column_inside = rows < m, columns < n
    # Rows and columns beyond the end repeat the last: nothing out of range is read, and they are not stored.
    x_rows = x + tl.minimum(rows, m - 1).to(tl.int64)[:, None] * x_stride
    weight_rows = weight + tl.minimum(columns, n - 1).to(tl.int64)[None, :] * K
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        ks = start + tl.arange(0, BLOCK_K)
        a = tl.load(x_rows + ks[None, :], mask=ks[None, :] < K, other=0.0)
        b = tl.load(weight_rows + ks[:, None], mask=ks[:, None] < K, other=0.0)
        accumulator = dot(a, b, accumulator)
    if HAS_BIAS:
        accumulator += tl.load(bias + columns, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    inside = row_inside[:, None] & column_inside[None, :]
    if HAS_RESIDUAL:
        at = residual + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
        accumulator += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    to = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    tl.store(to, narrow(accumulator, out.dtype.element_ty), mask=inside)


def matmul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """residual + x W^T + bias, added up in float32. x: [M, K], rows may lie apart. weight: [N, K], contiguous. bias:
    [N] or None. residual: [M, N] or None; used up, the result is written over it. All of one dtype. Returns [M, N]."""
    n = weight.shape[0]
    out = torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device) if residual is None else residual
    _launch(x, weight[None], bias, residual, out)
    return out


def head_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each head's columns times its own matrix. x: [M, H * K]; weight: [H, N, K], contiguous. Returns [M, H * N]."""
    heads, n, _ = weight.shape
    out = torch.empty(x.shape[0], heads * n, dtype=x.dtype, device=x.device)
    _launch(x, weight, None, None, out)
    return out


def _launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, out: torch.Tensor
) -> None:
    m, (heads, n, k) = x.shape[0], weight.shape
    if m == 0:
        return
    assert weight.is_contiguous(), "the matrix lies in one piece"
    assert x.stride(1) == out.stride(1) == 1, "the elements of a row lie side by side"
    tiles = tiles_for(n, x.dtype)
    launch(
        _matmul_kernel,
        (blocks_of(m, tiles.block_m) * blocks_of(n, tiles.block_n), heads),
        x,
        weight,
        bias,
        residual,
        out,
        m,
        n,
        x.stride(0),
        out.stride(0),
        k,
        n,
        K=k,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        GROUP=GROUP_M,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
