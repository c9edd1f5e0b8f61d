"""Sums of what ranks have gathered. Limit: memory bandwidth."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.runtime import blocks_of, launch, narrow

ELEMENTS = 1024
"""Elements that a program adds up."""


@triton.jit(do_not_specialize=["size"])
def _sum_kernel(parts, out, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    total = tl.load(parts + index, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * size.to(tl.int64) + index, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + index, narrow(total, out.dtype.element_ty), mask=mask)


def sum_parts(parts: torch.Tensor) -> torch.Tensor:
    """(parts[0] + parts[1]) + ..., added in float32 and rounded once. An element's order of additions depends on
    nothing else, so the sum is the same in every batch. parts: [ranks, ...] contiguous."""
    assert parts.is_contiguous(), "parts lie one behind the other"
    out = torch.empty_like(parts[0])
    launch(_sum_kernel, (blocks_of(out.numel(), ELEMENTS),), parts, out, out.numel(), PARTS=len(parts), BLOCK=ELEMENTS)
    return out
