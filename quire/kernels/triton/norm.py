"""RMSNorm and LayerNorm over rows, optionally of a sum written back; sums of ranks' parts. Limit: memory bandwidth."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.runtime import blocks_of, launch, narrow, next_power_of_2

ELEMENTS_PER_WARP = 512
"""Elements of a row per warp: two 16-byte loads per thread in 16 bits."""
MAX_WARPS = 16


@triton.jit
def _norm_kernel(
    x,
    residual,
    weight,
    bias,
    out,
    x_stride,
    residual_stride,
    size,
    epsilon,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CENTRED: tl.constexpr,
    IS_WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    dtype = out.dtype.element_ty
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        at = residual + row * residual_stride + columns
        values += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        summed = narrow(values, dtype)
        tl.store(at, summed, mask=inside)
        values = summed.to(tl.float32)
    if CENTRED:
        mean = tl.sum(values, axis=0) / size
        values = tl.where(inside, values - mean, 0.0)
    scaled = values * tl.rsqrt(tl.sum(values * values, axis=0) / size + epsilon)
    if not CENTRED and not IS_WIDE:
        # Round before multiplying by the weight, like Transformers.
        scaled = narrow(scaled, dtype).to(tl.float32)
    if HAS_WEIGHT:
        scaled *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        scaled += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + columns, narrow(scaled, dtype), mask=inside)


def norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
    *,
    centred: bool,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """LayerNorm or RMSNorm of rows. x: [T, size], rows may be strided. weight, bias: [size] or None,
    in x's dtype or (RMSNorm) float32, which multiplies the unrounded value. centred: LayerNorm. residual: [T, size] in
    x's dtype or None; becomes residual + x, which is normalised. Returns [T, size]."""
    num_rows, size = x.shape
    out = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    assert x.stride(1) == 1, "the elements of a row lie side by side"
    assert residual is None or residual.stride(1) == 1, "the elements of a row lie side by side"
    block = next_power_of_2(size)
    launch(
        _norm_kernel,
        (num_rows,),
        x,
        residual,
        weight,
        bias,
        out,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        size,
        epsilon,
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        CENTRED=centred,
        IS_WIDE=weight is not None and weight.dtype == torch.float32,
        BLOCK=block,
        num_warps=min(MAX_WARPS, max(1, block // ELEMENTS_PER_WARP)),
    )
    return out


SUM_BLOCK = 1024
"""Elements of a sum that a program adds up."""


@triton.jit(do_not_specialize=["size"])
def _sum_kernel(parts, out, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    total = tl.load(parts + index, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * size.to(tl.int64) + index, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + index, narrow(total, out.dtype.element_ty), mask=mask)


def sum_parts(parts: torch.Tensor) -> torch.Tensor:
    """Sum of partial results: (parts[0] + parts[1]) + ..., added in float32 and rounded once."""
    assert parts.is_contiguous(), "parts lie one behind the other"
    out = torch.empty_like(parts[0])
    launch(
        _sum_kernel, (blocks_of(out.numel(), SUM_BLOCK),), parts, out, out.numel(), PARTS=len(parts), BLOCK=SUM_BLOCK
    )
    return out
