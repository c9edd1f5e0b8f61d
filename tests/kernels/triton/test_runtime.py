"""Products in every dtype."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from quire.kernels.triton.runtime import dot, launch, narrow


@triton.jit
def _multiply(a, b, out, SIZE: tl.constexpr):
    rows = tl.arange(0, SIZE)
    where = rows[:, None] * SIZE + rows[None, :]
    product = dot(tl.load(a + where), tl.load(b + where), tl.zeros((SIZE, SIZE), tl.float32))
    tl.store(out + where, product)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_added_in_float32(dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(32, 32, generator=generator).to(device, dtype) for _ in range(2))
    out = torch.empty(32, 32, device=device)
    _multiply[(1,)](a, b, out, SIZE=32)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


@triton.jit
def _narrow(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, narrow(tl.load(x + at), out.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_to_the_nearest(dtype: torch.dtype, device: torch.device) -> None:
    special = [0.0, -0.0, 1.0, 1.00390625, 1.01171875, 65504.0, -65504.0, torch.inf, -torch.inf, torch.nan]
    x = torch.cat((torch.tensor(special), torch.randn(1014, generator=torch.Generator().manual_seed(0)) * 50)).to(
        device
    )
    out = torch.empty(1024, dtype=dtype, device=device)
    launch(_narrow, (1,), x, out, SIZE=1024)
    torch.testing.assert_close(out, x.to(dtype), rtol=0, atol=0, equal_nan=True)
