"""Rounding of activations to 8 bits (e4m3 or integers) row by row, for products with such weights. A row's scales
depend only on the row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.float8 import E4M3_LARGEST, e4m3_bits
from quire.kernels.triton.runtime import INTERPRETED, blocks_of, bound, launch, next_power_of_2
from quire.kernels.triton.weight_formats import StoredMatrix

BLOCK = 4096
"""Elements that a program holds at once."""
LARGEST = tl.constexpr(127.0)
"""Largest magnitude of a rounded int8 value."""
LEAST_PEAK = tl.constexpr(2.0**-119)
"""Smallest magnitude; 127 over a smaller one would overflow."""
INFINITY_BITS = tl.constexpr(0x7F800000)


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Activations rounded for a product: x = codes * scales. codes: [T, K] int8, or float8_e4m3fn (interpreter: their
    bits, uint8). scales: [T, groups] float32; one per row for integers."""

    codes: torch.Tensor
    scales: torch.Tensor


@triton.jit
def _round_kernel(x, codes, scales, width, x_stride, scale_stride, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, group of GROUP elements; the last may be shorter)."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    first = group * GROUP
    end = tl.minimum(first + GROUP, width)
    peaks = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, GROUP, BLOCK):
        at = first + start + tl.arange(0, BLOCK)
        values = tl.load(x + row * x_stride + at, mask=(start + tl.arange(0, BLOCK) < GROUP) & (at < end), other=0.0)
        peaks = tl.maximum(peaks, tl.abs(values.to(tl.float32)))
    peak = tl.max(peaks, 0)
    scale = tl.where(peak > 0, peak / E4M3_LARGEST, 1.0)
    tl.store(scales + row * scale_stride + group, scale)
    for start in range(0, GROUP, BLOCK):
        at = first + start + tl.arange(0, BLOCK)
        inside = (start + tl.arange(0, BLOCK) < GROUP) & (at < end)
        values = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
        quotient = tl.div_rn(values, tl.zeros((BLOCK,), tl.float32) + scale)
        tl.store(codes + row * width + at, e4m3_bits(quotient), mask=inside)


@triton.jit
def _round_integers_kernel(x, codes, scales, width, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    columns = tl.arange(0, BLOCK)
    peaks = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, bound(width), BLOCK):
        values = tl.load(x + start + columns, mask=start + columns < width, other=0.0).to(tl.float32)
        # Bits of magnitudes have the same order as their values, with infinity and NaN above all.
        peaks = tl.maximum(peaks, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    bits = tl.zeros((1,), tl.int32) + tl.max(peaks, 0)
    peak = bits.to(tl.float32, bitcast=True)
    rounds = (bits < INFINITY_BITS) & (peak >= LEAST_PEAK)
    scale = tl.div_rn(peak, tl.zeros((1,), tl.float32) + LARGEST)
    scale = tl.where(rounds, scale, tl.where(bits < INFINITY_BITS, 0.0, float("nan")))
    tl.store(scales + row + tl.arange(0, 1), scale)
    inverse = tl.div_rn(tl.zeros((1,), tl.float32) + LARGEST, tl.where(rounds, peak, 1.0))
    for start in range(0, bound(width), BLOCK):
        inside = start + columns < width
        values = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
        # The minimum between product and sum keeps compilers from fusing them.
        quotient = tl.maximum(tl.minimum(tl.where(rounds, values, 0.0) * inverse, LARGEST), -LARGEST)
        # Rounds to nearest, ties to even: float32 has steps of 1 from 1.5 * 2 ** 23 on.
        whole = (quotient + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
        tl.store(codes + row * width + start + columns, whole.to(tl.int8), mask=inside)


def round_rows(x: torch.Tensor, matrix: StoredMatrix) -> RoundedRows:
    """Round x, [T, K] (rows may be strided), to e4m3 or integers, as the matrix needs."""
    return _round_to_integers(x) if matrix.is_integer else round_to_e4m3(x, matrix.group_size)


def round_to_e4m3(x: torch.Tensor, group_size: int) -> RoundedRows:
    """Round rows to e4m3 with scales. x: [T, K], rows may be strided. Groups of `group_size` (0: the row) are
    divided by largest magnitude / 448 and rounded; non-finite becomes NaN."""
    num_rows, width = x.shape
    group = group_size or width
    groups = blocks_of(width, group)
    codes = torch.empty(num_rows, width, dtype=torch.uint8, device=x.device)
    scales = torch.empty(num_rows, groups, dtype=torch.float32, device=x.device)
    if num_rows > 0:
        launch(
            _round_kernel,
            (num_rows, groups),
            x,
            codes,
            scales,
            width,
            x.stride(0),
            groups,
            GROUP=group,
            BLOCK=min(BLOCK, next_power_of_2(group)),
            num_warps=4,
        )
    return RoundedRows(codes if INTERPRETED else codes.view(torch.float8_e4m3fn), scales)


def _round_to_integers(x: torch.Tensor) -> RoundedRows:
    """Multiply each row by 127 over its largest magnitude and round to nearest, ties to even. A non-finite row gets a
    NaN scale, a zero row the scale 0."""
    num_rows, width = x.shape
    codes = torch.empty(num_rows, width, dtype=torch.int8, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    if num_rows > 0:
        launch(
            _round_integers_kernel,
            (num_rows,),
            x,
            codes,
            scales,
            width,
            x.stride(0),
            BLOCK=min(BLOCK, next_power_of_2(width)),
            num_warps=4,
        )
    return RoundedRows(codes, scales)
