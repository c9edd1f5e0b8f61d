"""Products in every dtype, whose bits do not depend on the place in a block, and rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from quire.kernels.triton import runtime
from quire.kernels.triton.runtime import blocks_of, dot, launch, narrow, next_power_of_2

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@triton.jit
def _multiply(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TRANSPOSED: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    rows = tl.load(a + m[:, None] * K + k[None, :])
    if TRANSPOSED:
        columns = tl.trans(tl.load(b + n[:, None] * K + k[None, :]))
    else:
        columns = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], dot(rows, columns, tl.full((M, N), 1.0, tl.float32)))


def multiply(a: torch.Tensor, b: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
    """1 + a @ b by one program. a: [M, K], b: [K, N]. transposed: the kernel reads it from memory of [N, K]."""
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n, device=a.device)
    operand = b.T.contiguous() if transposed else b
    launch(_multiply, (1,), a, operand, out, M=m, N=n, K=k, TRANSPOSED=transposed)
    return out


def operands(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
    return a.to(device, dtype), b.to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_added_in_float32(dtype: torch.dtype, device: torch.device) -> None:
    a, b = operands(32, 16, 64, dtype, device)
    expected = 1 + a.double() @ b.double()
    for transposed in (False, True):
        torch.testing.assert_close(multiply(a, b, transposed=transposed).double(), expected, rtol=1e-5, atol=2e-5)


def matmul_of_an_order_per_row(a: np.ndarray, b: np.ndarray, **_: object) -> np.ndarray:
    """A product as a BLAS may compute it: row m begins its sum over k at m."""
    rows = [
        sum((row[at, None] * b[at] for at in np.roll(np.arange(len(b)), -m)), np.zeros(b.shape[1], np.float32))
        for m, row in enumerate(a.astype(np.float32))
    ]
    return np.stack(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(16, 16), (16, 64), (64, 32)])
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_bits_of_a_product_do_not_depend_on_the_place(
    n: int, k: int, dtype: torch.dtype, transposed: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on what NumPy's BLAS does with a row at one place or another."""
    a, b = operands(16, n, k, dtype, device)
    product = multiply(a, b, transposed=transposed)
    monkeypatch.setattr(np, "matmul", matmul_of_an_order_per_row)
    for shift in range(16):
        assert torch.equal(multiply(a.roll(shift, 0), b, transposed=transposed), product.roll(shift, 0))
        assert torch.equal(multiply(a, b.roll(shift, 1), transposed=transposed), product.roll(shift, 1))


def test_every_kernel_multiplies_by_this_product() -> None:
    """Interpreted: three files have products of their own for GPUs alone. Sums of integers are exact in any order."""
    sources = {path.name: path.read_text() for path in Path(runtime.__file__).parent.glob("*.py")}
    found = {name: source for name, source in sources.items() if "tl.dot(" in source}
    assert sorted(found) == ["delta_common.py", "runtime.py", "skinny.py", "weight_formats.py"]
    for name, source in found.items():
        assert source.count("tl.dot(") - source.count("out_dtype=tl.int32)") == 1, name
        assert "INTERPRETED" in source, name


def test_the_injected_order_is_one_that_a_row_shows() -> None:
    a, b = operands(16, 16, 64, torch.float32, torch.device("cpu"))
    found = [matmul_of_an_order_per_row(a.roll(shift, 0).numpy(), b.numpy())[shift] for shift in range(16)]
    assert not all(np.array_equal(row, found[0]) for row in found)


@triton.jit
def _narrow(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, narrow(tl.load(x + at), out.dtype.element_ty))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_to_the_nearest(dtype: torch.dtype, device: torch.device) -> None:
    special = [0.0, -0.0, 1.0, 1.00390625, 1.01171875, 65504.0, -65504.0, torch.inf, -torch.inf, torch.nan]
    x = torch.cat((torch.tensor(special), torch.randn(1014, generator=torch.Generator().manual_seed(0)) * 50)).to(
        device
    )
    out = torch.empty(1024, dtype=dtype, device=device)
    launch(_narrow, (1,), x, out, SIZE=1024)
    torch.testing.assert_close(out, x.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_sizes_of_grids_and_blocks_are_tritons() -> None:
    for size in (*range(1, 70), 4095, 4096, 4097, 151936):
        assert next_power_of_2(size) == triton.next_power_of_2(size)
        assert blocks_of(size, 64) == triton.cdiv(size, 64)
    assert blocks_of(0, 64) == 0
