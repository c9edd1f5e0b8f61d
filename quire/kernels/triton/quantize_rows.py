"""Activations rounded to e4m3 row by row, for products with weights in e4m3.

Limit: the bytes, each element read twice (the second time from a cache) and written once as a byte. A row's scales
depend on that row alone, so its bits do not depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.float8 import E4M3_LARGEST, e4m3_bits
from quire.kernels.triton.runtime import INTERPRETED, blocks_of, launch, next_power_of_2

BLOCK = 4096
"""Elements that a program holds at once."""


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """x = codes * scales. codes: [T, K] float8_e4m3fn (in the interpreter their bits, uint8). scales: [T, groups]
    float32."""

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


def round_rows(x: torch.Tensor, group_size: int) -> RoundedRows:
    """x: [T, K], rows may lie apart. Each group of `group_size` elements of a row (0: the row) is divided by its
    largest magnitude / 448 and rounded to the nearest. What is not finite becomes NaN."""
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
