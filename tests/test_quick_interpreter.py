"""What tests/quick_interpreter.py leaves out of Triton's interpreter changes no verdict."""

from __future__ import annotations

import os
from functools import partial
from itertools import product
from typing import Any

import numpy as np
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


KINDS = ["int1", "int8", "int32", "int64", "uint8", "uint32", "float16", "bfloat16", "float32", "float64"]
SHAPES = [((), ()), ((8,), ()), ((), (8,)), ((8,), (8,)), ((4, 1), (1, 2)), ((8,), (2, 8)), ((1, 1), (4, 2))]
VALUES: list[Any] = [0, 1, 3, -2, 0.5, True, 2**40]


def interpreter() -> Any:
    quick_interpreter.install()
    from triton.runtime import interpreter

    return interpreter


def tensor_of(kind: Any, shape: tuple[int, ...], seed: int) -> Any:
    """Of random bits, as far as they are small numbers."""
    with_types = interpreter()
    numbers = np.random.default_rng(seed).integers(0, 5, shape or (1,))
    data = numbers.astype(with_types._get_np_dtype(kind))
    return tl.tensor(with_types.TensorHandle(data, kind), tl.block_type(kind, list(shape)) if shape else kind)


def described(compute: Any, *operands: Any) -> Any:
    """A result's types and bits, or the words of an error."""
    with np.errstate(all="ignore"):
        try:
            result = compute(*operands, _semantic=interpreter().interpreter_semantic)
        except Exception as error:
            return type(error), str(error)
    data = result.handle.data
    return result.type.name, str(result.handle.dtype), str(result.shape), data.dtype, data.shape, data.tobytes()


def operations() -> dict[str, tuple[Any, Any]]:
    """Of two values: Triton's, and its planned replacement."""
    found = {each.__name__: (each.__wrapped__, planned) for each, planned in interpreter().planned.items()}
    return {name: both for name, both in found.items() if name.startswith("__") and name != "__getitem__"}


@pytest.mark.skipif(not INTERPRETED, reason="for the interpreter")
def test_planned_operations_have_the_bits_of_triton() -> None:
    """The second time other operands of the same types are computed by the plan of the first ones."""
    num_results = 0
    with quick_interpreter.without_overflow_checks():
        for (name, (triton_computes, planned)), left, right in product(operations().items(), KINDS, KINDS):
            shapes = SHAPES if (left, right) in (("int32", "int32"), ("float32", "int32")) else SHAPES[-2:-1]
            for (one, other), seed in product(shapes, (1, 2)):
                operands = tensor_of(getattr(tl, left), one, seed), tensor_of(getattr(tl, right), other, seed + 7)
                expected = described(triton_computes, *operands)
                assert described(planned, *operands) == expected, (name, left, right, one, other)
                num_results += len(expected) > 2
        for (name, (triton_computes, planned)), left, value in product(operations().items(), KINDS, VALUES):
            for seed in (1, 2):
                operand = tensor_of(getattr(tl, left), (8,), seed)
                assert described(planned, operand, value) == described(triton_computes, operand, value), (
                    name,
                    left,
                    value,
                )
    assert num_results > 2000


@pytest.mark.skipif(not INTERPRETED, reason="for the interpreter")
def test_planned_choices_conversions_and_views_have_the_bits_of_triton() -> None:
    planned = {each.__name__: (each.__wrapped__, quick) for each, quick in interpreter().planned.items()}
    for seed, left, right in product((1, 2), KINDS, KINDS):
        value, other = tensor_of(getattr(tl, left), (4, 2), seed), tensor_of(getattr(tl, right), (4, 1), seed + 7)
        for condition in (tensor_of(tl.int1, (4, 2), seed), tensor_of(tl.int1, (), seed)):
            for x, y in ((value, other), (value, 1), (0.25, other), (value, -3), (value, tl.constexpr(True))):
                triton_chooses, chosen = planned["where"]
                assert described(chosen, condition, x, y) == described(triton_chooses, condition, x, y), (left, right)
        triton_converts, converted = planned["to"]
        assert described(converted, value, getattr(tl, right)) == described(triton_converts, value, getattr(tl, right))
        as_bits = described(partial(triton_converts, bitcast=True), value, getattr(tl, right))
        assert described(partial(converted, bitcast=True), value, getattr(tl, right)) == as_bits
    for slices in ((None, slice(None)), (slice(None), None), (None, None, slice(None)), (slice(1, 2),)):
        triton_views, viewed = planned["__getitem__"]
        for seed in (1, 1, 2):
            value = tensor_of(tl.float32, (8,), seed)
            assert described(viewed, value, slices) == described(triton_views, value, slices)
    for name, given in (("arange", (2, 10)), ("arange", (0, 3)), ("full", ([4, 2], 0.1, tl.float16))):
        triton_makes, made = planned[name]
        assert described(made, *given) == described(made, *given) == described(triton_makes, *given)


@triton.jit
def _reduce(values, out, rows: tl.constexpr, columns: tl.constexpr, operation: tl.constexpr, axis: tl.constexpr):
    row, column = tl.arange(0, rows)[:, None], tl.arange(0, columns)[None, :]
    block = tl.load(values + row * columns + column)
    if operation == "sum":
        result = tl.sum(block, axis=axis)
    elif operation == "max":
        result = tl.max(block, axis=axis)
    else:
        result = tl.min(block, axis, keep_dims=False)
    if axis is None:
        tl.store(out, result)
    elif axis == 0:
        tl.store(out + tl.arange(0, columns), result)
    else:
        tl.store(out + tl.arange(0, rows), result)


@pytest.mark.skipif(not INTERPRETED, reason="for the interpreter")
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int32, torch.float16, torch.float32])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_reductions_are_those_of_torch(dtype: torch.dtype, axis: int | None) -> None:
    quick_interpreter.install()
    for seed, operation in product((1, 2), ("sum", "max", "min")):
        values = torch.randint(0, 2 if dtype == torch.bool else 9, (4, 8), generator=torch.manual_seed(seed)).to(dtype)
        wide = values.float() if dtype.is_floating_point else values.int()
        named = {} if axis is None else {"dim": axis}
        expected = wide.sum(**named) if operation == "sum" else getattr(wide, f"a{operation}")(**named)
        out = torch.zeros(expected.shape or (1,), dtype=expected.dtype)
        _reduce[(1,)](values, out, 4, 8, operation, axis)
        assert torch.equal(out, expected.reshape(out.shape)), operation


@pytest.mark.skipif(not INTERPRETED, reason="for the interpreter")
def test_operands_of_known_types_need_nothing_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    _, planned = operations()["__add__"]
    left, right = tensor_of(tl.int32, (8,), 3), tensor_of(tl.int64, (), 4)
    expected = described(planned, left, right)

    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(interpreter().TritonSemantic, "add", fail)
    assert described(planned, left, right) == expected
    assert described(planned, tensor_of(tl.int32, (16,), 3), right)[0] is AssertionError
