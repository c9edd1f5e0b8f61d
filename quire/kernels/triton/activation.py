"""Activation functions of `quire.kernels.activation`, alone or gated (times the other half of the row). Limit: memory
bandwidth."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from quire.kernels.triton.runtime import blocks_of, launch, narrow

SILU = tl.constexpr(0)
RELU = tl.constexpr(1)
GELU = tl.constexpr(2)
GELU_TANH = tl.constexpr(3)
QUICK_GELU = tl.constexpr(4)
KINDS: Mapping[str, int] = {
    "silu": SILU.value,
    "swish": SILU.value,
    "relu": RELU.value,
    "gelu": GELU.value,
    "gelu_new": GELU_TANH.value,
    "gelu_fast": GELU_TANH.value,
    "gelu_pytorch_tanh": GELU_TANH.value,
    "quick_gelu": QUICK_GELU.value,
}
"""Activation numbers for kernels, by name in `quire.kernels.activation.ACTIVATIONS`."""

BLOCK = 1024
"""Elements of a program of 4 warps: one 16-byte load per thread in 16 bits, two if gated."""

SQRT_HALF = tl.constexpr(0.7071067811865476)
TWICE_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """Activation KIND of x, float32 of any shape. NaN stays NaN."""
    if KIND == RELU:
        return tl.where(x < 0.0, 0.0, x)
    if KIND == GELU:
        return 0.5 * x * (tl.erf(x * SQRT_HALF) + 1.0)
    if KIND == GELU_TANH:
        # (1 + tanh(z)) / 2 = sigmoid(2 z)
        inner = (x * x * x * 0.044715 + x) * TWICE_SQRT_2_OVER_PI
    elif KIND == QUICK_GELU:
        inner = x * 1.702
    else:
        inner = x
    return x / (tl.exp(-inner) + 1.0)


@triton.jit
def _activation_kernel(x, out, x_stride, width, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    at = x + row * x_stride + columns
    dtype = out.dtype.element_ty
    result = activate(tl.load(at, mask=inside, other=0.0).to(tl.float32), KIND)
    if GATED:
        # Round before the product, like the torch version.
        result = narrow(result, dtype).to(tl.float32) * tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, narrow(result, dtype), mask=inside)


def activation(x: torch.Tensor, name: str, *, gated: bool) -> torch.Tensor:
    """activation(x) or activation(gate) * up: [T, width] in x's dtype, computed in float32. x: [T, width], or [T, 2 *
    width], gate first; rows may be strided. name: key of KINDS."""
    num_rows, columns = x.shape
    width = columns // 2 if gated else columns
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    assert x.stride(1) == 1, "the elements of a row lie side by side"
    grid = (num_rows, blocks_of(width, BLOCK))
    launch(
        _activation_kernel, grid, x, out, x.stride(0), width, KIND=KINDS[name], GATED=gated, BLOCK=BLOCK, num_warps=4
    )
    return out
