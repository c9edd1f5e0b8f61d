"""Weight matrices for kernels: floating point, or small codes widened in registers. Products of codes are exact, summed
in float32 in one order, then scaled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.triton.float8 import widen_e4m3
from quire.kernels.triton.packed_codes import widen_e2m1
from quire.kernels.triton.runtime import INTERPRETED, dot, narrow

PLAIN, E4M3, I8, I4, MXFP4, NVFP4 = (tl.constexpr(number) for number in range(6))
"""Format numbers. From I4 on, a byte has two codes."""
PAIRED = 64
"""Input features per run of bytes in paired formats: byte i of 32 has feature i in its low nibble, i + 32 in its high
one."""
LEAST_K = 16
"""Minimum input features of a matrix-unit product; twice as many for 8-bit numbers and halves of a run."""


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """Matrix, or a stack of `count`, on a device. codes: [count, rows, columns] of PLAIN's dtype, int8 (I8),
    float8_e4m3fn or its bits as uint8 (E4M3); paired formats: [count, rows, runs * 32] uint8, runs = columns / 64
    rounded up. scales: [count, rows, groups], float32; uint8 codes for MXFP4 (e8m0) and NVFP4 (e4m3); None for PLAIN.
    group_size: columns per group, 0: the row. offsets: [count, rows, groups] float32 or None. row_scales: [count, rows]
    float32, NVFP4 only. All contiguous."""

    kind: int
    columns: int
    codes: torch.Tensor
    scales: torch.Tensor | None = None
    group_size: int = 0
    offsets: torch.Tensor | None = None
    row_scales: torch.Tensor | None = None

    @classmethod
    def plain(cls, weight: torch.Tensor) -> StoredMatrix:
        """Unquantised matrix. weight: [rows, columns] or [count, rows, columns]; contiguous."""
        assert weight.is_contiguous(), "the matrix lies in one piece"
        return cls(PLAIN.value, weight.shape[-1], weight if weight.dim() == 3 else weight[None])

    @property
    def shape(self) -> tuple[int, int, int]:
        """(count, rows, columns)."""
        return self.codes.shape[0], self.codes.shape[1], self.columns

    @property
    def is_integer(self) -> bool:
        return self.kind in (I8.value, I4.value)

    @property
    def multiplies_bytes(self) -> bool:
        """True if rows of the matrix's kind of 8-bit numbers can multiply it directly."""
        return (self.kind == E4M3.value or self.is_integer) and self.group_size % (2 * LEAST_K) == 0

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Kernel arguments: codes, scales, offsets, row_scales."""
        return self.codes, self.scales, self.offsets, self.row_scales

    def with_tensors(self, tensors: Sequence[torch.Tensor | None]) -> StoredMatrix:
        """Stack of the same format with other `tensors`."""
        codes, scales, offsets, row_scales = tensors
        assert codes is not None, "every matrix has codes"
        return replace(self, codes=codes, scales=scales, offsets=offsets, row_scales=row_scales)

    def constants(self, *, rounds_activations: bool) -> dict[str, Any]:
        """Compile-time arguments of kernels that call `product`."""
        return {
            "K": self.columns,
            "FORMAT": self.kind,
            "GROUP": self.group_size,
            "HAS_OFFSETS": self.offsets is not None,
            "ROUNDED": rounds_activations,
        }


@triton.jit
def exponent(codes):
    """Scale of an e8m0 code: 2 ** (code - 127), float32."""
    wide = codes.to(tl.uint32)
    return tl.where(wide == 0, 1 << 22, wide << 23).to(tl.float32, bitcast=True)


@triton.jit
def _add_products(a, b, accumulator, ROUNDED: tl.constexpr, PARTIAL: tl.constexpr):
    """One step of a product: accumulator + a @ b for int8 (int32 sums), e4m3 (if ROUNDED) or floats."""
    if accumulator.dtype == tl.int32:
        total = tl.dot(a, b, accumulator, out_dtype=tl.int32)
    elif not ROUNDED:
        total = dot(a, b, accumulator)
    elif INTERPRETED:
        total = dot(widen_e4m3(a, tl.float32), widen_e4m3(b, tl.float32), accumulator)
    else:
        total = tl.dot(a, b, accumulator, max_num_imprecise_acc=PARTIAL)
    return total


@triton.jit
def _tile(
    from_row,
    pairs,
    scale_at,
    ks,
    half,
    DTYPE: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """[features, rows] of a matrix in DTYPE, or e4m3 or int8 if ROUNDED. from_row: [1, rows] pointers. pairs: loaded
    bytes of paired formats; nibble `half` counts."""
    inside = ks[:, None] < K
    if FORMAT <= E4M3:
        w = tl.load(from_row + ks[:, None], mask=inside, other=0.0)
        if FORMAT == E4M3 and not ROUNDED:
            w = widen_e4m3(w, DTYPE)
    elif FORMAT == I8:
        w = tl.load(from_row + ks[:, None], mask=inside, other=0)
        if not ROUNDED:
            w = w.to(tl.float32).to(DTYPE)
    else:
        codes = (pairs >> (4 * half)) & 0xF
        if FORMAT == I4:
            w = codes.to(tl.int8) if ROUNDED else codes.to(tl.float32).to(DTYPE)
        elif FORMAT == MXFP4:
            w = widen_e2m1(codes, DTYPE)
        else:
            # The product is exact: its factors have two and four significant bits.
            of_group = tl.load(scale_at[None, :] + (ks // GROUP)[:, None], mask=inside, other=0)
            w = (widen_e2m1(codes, tl.float16) * widen_e4m3(of_group, tl.float16)).to(DTYPE)
    return w


@triton.jit
def product(
    x_rows,
    x_scales,
    share,
    weight,
    scales,
    offsets,
    row_scales,
    rows,
    DTYPE: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    ROUNDED: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] float32: rows of x times rows of a StoredMatrix, added in order of k. x_rows: [BLOCK_M]
    pointers. ROUNDED: x is e4m3 (or bits), or int8 for integer matrices, with exact sums; x_scales: [BLOCK_M] pointers
    to rows' scales, per group for e4m3, per row for integers. share: [BLOCK_M] float32, factor of x if SHARED. rows:
    [BLOCK_N] int64, counted through the stack. DTYPE: of x before rounding."""
    PAIRS: tl.constexpr = FORMAT >= I4
    WHOLE: tl.constexpr = ROUNDED and FORMAT != E4M3
    SUMS: tl.constexpr = tl.int32 if WHOLE else tl.float32
    HALVES: tl.constexpr = 2 if PAIRS else 1
    STEP: tl.constexpr = BLOCK_K // HALVES
    GROUPED: tl.constexpr = GROUP > 0 and FORMAT != NVFP4
    NUM_GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP if GROUP > 0 else 1
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32 if GROUPED else SUMS)
    sums = tl.zeros((BLOCK_M,), SUMS)
    from_row = weight + rows[None, :] * ((K + 63) // 64 * 32 if PAIRS else K)
    scale_at = scales + rows * NUM_GROUPS if FORMAT != PLAIN else rows
    pairs = tl.zeros((STEP, BLOCK_N), tl.uint8) if PAIRS else rows
    for start in range(0, K, BLOCK_K):
        if PAIRS:
            pairs = tl.load(from_row + start // 2 + tl.arange(0, STEP)[:, None])
        for half in tl.static_range(HALVES):
            ks = start + half * STEP + tl.arange(0, STEP)
            a = tl.load(x_rows[:, None] + ks[None, :], mask=ks[None, :] < K, other=0 if WHOLE else 0.0)
            if SHARED and not ROUNDED:
                a = narrow(a.to(tl.float32) * share[:, None], DTYPE)
            w = _tile(from_row, pairs, scale_at, ks, half, DTYPE, K, FORMAT, GROUP, ROUNDED)
            part = tl.zeros((BLOCK_M, BLOCK_N), SUMS) if GROUPED else total
            part = _add_products(a, w, part, ROUNDED, STEP)
            if GROUPED:
                part = part.to(tl.float32)
                group = (start + half * STEP) // GROUP
                inside = group < NUM_GROUPS
                scale = tl.load(scale_at + group, mask=inside, other=0)
                scale = exponent(scale) if FORMAT == MXFP4 else scale
                if ROUNDED and not WHOLE:
                    part = part * tl.load(x_scales + group)[:, None]
                total = tl.fma(part, tl.broadcast_to(scale[None, :], part.shape), total)
                if HAS_OFFSETS:
                    offset = tl.load(offsets + rows * NUM_GROUPS + group, mask=inside, other=0.0)
                    total = _add_outer(total, tl.sum(a.to(SUMS), 1).to(tl.float32), offset)
            else:
                total = part
                if HAS_OFFSETS:
                    sums += tl.sum(a.to(SUMS), 1)
    if FORMAT != PLAIN and not GROUPED:
        factor = tl.load(row_scales + rows) if FORMAT == NVFP4 else tl.load(scale_at)
        total = total.to(tl.float32) * factor[None, :]
        if HAS_OFFSETS:
            total = _add_outer(total, sums.to(tl.float32), tl.load(offsets + rows))
    if ROUNDED and (WHOLE or not GROUPED):
        total = total * tl.load(x_scales)[:, None]
    if SHARED and ROUNDED:
        total = total * share[:, None]
    return total


@triton.jit
def _add_outer(total, sums, offset):
    return tl.fma(tl.broadcast_to(sums[:, None], total.shape), tl.broadcast_to(offset[None, :], total.shape), total)
