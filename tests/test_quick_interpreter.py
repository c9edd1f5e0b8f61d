"""What tests/quick_interpreter.py leaves out of Triton's interpreter changes no verdict."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from tests import quick_interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LIMITS = {torch.int8: 2**7, torch.int16: 2**15, torch.int32: 2**31}


@triton.jit
def _calculate(left, right, out, operation: tl.constexpr, size: tl.constexpr):
    places = tl.arange(0, size)
    a, b = tl.load(left + places), tl.load(right + places)
    if operation == "add":
        result = a + b
    elif operation == "sub":
        result = a - b
    else:
        result = a * b
    tl.store(out + places, result)


def calculate(operation: str, left: list[int], right: list[int], dtype: torch.dtype) -> list[int]:
    quick_interpreter.install()
    a, b = torch.tensor(left, dtype=dtype), torch.tensor(right, dtype=dtype)
    out = torch.zeros_like(a)
    _calculate[(1,)](a, b, out, operation, len(left))
    found: list[int] = out.tolist()
    return found


@pytest.mark.skipif(not INTERPRETED, reason="compiled kernels do not look for overflow")
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_overflow_is_found(dtype: torch.dtype) -> None:
    limit = LIMITS[dtype]
    assert calculate("add", [limit - 2, -limit + 1], [1, -1], dtype) == [limit - 1, -limit]
    assert calculate("sub", [limit - 2, -limit + 1], [-1, 1], dtype) == [limit - 1, -limit]
    assert calculate("mul", [limit // 2, 3], [-2, 5], dtype) == [-limit, 15]
    for operation, left, right in (
        ("add", [1, limit - 1], [1, 1]),
        ("add", [-limit, 1], [-1, 1]),
        ("sub", [1, -limit], [1, 1]),
        ("mul", [limit // 2, 1], [2, 1]),
    ):
        with pytest.raises(Exception, match=f"overflow detected for operation {operation}"):
            calculate(operation, left, right, dtype)
        with quick_interpreter.without_overflow_checks():
            calculate(operation, left, right, dtype)


@pytest.mark.skipif(not INTERPRETED, reason="for the interpreter")
def test_shapes_are_those_of_triton() -> None:
    quick_interpreter.install()
    row = tl.block_type(tl.float32, [8])
    assert (str(row), row.numel, list(row.shape)) == (str(row.with_element_ty(tl.float32)), 8, [8])
    assert row != tl.block_type(tl.int32, [8])
    assert row != tl.block_type(tl.float32, [4, 2])
    assert "8" in str(row)
    assert "fp32" in str(row)
    tensor = tl.tensor(None, tl.block_type(tl.float16, [4, 2]))
    assert ([each.value for each in tensor.shape], tensor.numel.value, tensor.dtype) == ([4, 2], 8, tl.float16)
    scalar = tl.tensor(None, tl.int32)
    assert (list(scalar.shape), scalar.numel.value, scalar.dtype) == ([], 1, tl.int32)
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.float32, [3])


@pytest.mark.skipif(not INTERPRETED, reason="for the interpreter")
def test_tuples_types_and_constants_are_those_of_triton() -> None:
    quick_interpreter.install()
    pair = tl.tuple([1, tl.constexpr(2)])
    assert pair == tl.tuple([1, 2])
    assert pair == (1, 2)
    assert pair != tl.tuple([1, 3])
    assert [str(each) for each in pair.type.types] == [str(each) for each in tl.tuple([1, 2], pair.type).type.types]
    assert len(pair.type.fields) == 2
    assert tl.float32 == tl.constexpr(tl.float32)
    assert tl.float32 != tl.float64
    assert tl.float32 != 5
    assert tl.pointer_type(tl.float32) != tl.float32


@triton.jit
def _mix(flags, whole, half, out, size: tl.constexpr):
    rows, columns = tl.arange(0, size)[:, None], tl.arange(0, size)[None, :]
    bits = tl.load(flags + rows) & tl.load(flags + columns)
    total = tl.load(whole + rows) + tl.load(half + columns) * 2 - bits
    tl.store(out + rows * size + columns, total / (tl.load(whole + columns) + 1))


@pytest.mark.skipif(not INTERPRETED, reason="for the interpreter")
def test_operands_of_other_shapes_and_types_are_made_to_fit() -> None:
    quick_interpreter.install()
    flags, whole, half = torch.tensor([True, False]), torch.tensor([3, 5]), torch.tensor([0.5, 1.5]).half()
    out = torch.zeros(2, 2)
    _mix[(1,)](flags, whole, half, out, 2)
    bits = flags[:, None] & flags[None, :]
    assert torch.equal(out, (whole[:, None] + half[None, :] * 2 - bits.half()).float() / (whole[None, :] + 1))
