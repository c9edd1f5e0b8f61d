"""Products in every dtype."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from quire.kernels.triton.runtime import dot


@triton.jit
def _multiply(a, b, out, SIZE: tl.constexpr):
    rows = tl.arange(0, SIZE)
    where = rows[:, None] * SIZE + rows[None, :]
    product = dot(tl.load(a + where), tl.load(b + where), tl.zeros((SIZE, SIZE), tl.float32))
    tl.store(out + where, product)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_added_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(32, 32, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(32, 32)
    _multiply[(1,)](a, b, out, SIZE=32)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
