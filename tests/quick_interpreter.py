"""Triton's interpreter, with what it repeats left out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np


def _interpreter() -> Any:
    """None in a process that has not imported it."""
    return sys.modules.get("triton.runtime.interpreter")


def install() -> None:
    """Once in a process, when Triton has been imported."""
    interpreter = _interpreter()
    if interpreter is None or hasattr(interpreter, "replaced_in_this_launch"):
        return
    _replace_once_in_a_launch(interpreter)
    _remember_shapes(interpreter.tl.core)
    _remember_types(interpreter)
    _check_overflow_in_numpy(interpreter)


def _replace_once_in_a_launch(interpreter: Any) -> None:
    """On every call of one Triton function by another the interpreter searches all of `triton.language`, to replace the
    same functions by the same ones: a third of the time of an interpreted model. Once in a launch is enough."""
    replace_functions, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: set[tuple[bool, ...]] = set()
    interpreter.replaced_in_this_launch = replaced

    @cache
    def modules_of(function: Any) -> tuple[bool, ...]:
        seen = {id(value) for value in function.__globals__.values()}
        return tuple(id(module) in seen for module in (interpreter.tl, interpreter.tl.core))

    def replace_once(function: Any) -> Any:
        modules = modules_of(function)
        if modules in replaced:
            return None  # of use only to a launch, which is the first that asks
        replaced.add(modules)
        return replace_functions(function)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        replaced.clear()  # the end of the last launch has undone its replacements
        return launch(self, *args, **kwargs)

    interpreter._patch_lang = replace_once
    interpreter.GridExecutor.__call__ = launch_anew


def _remember_shapes(core: Any) -> None:
    """Every intermediate result describes its shape anew, by objects that Triton does not change: a third of the time
    of a kernel. One description of each shape is enough."""
    make_tensor, make_block = core.tensor.__init__, core.block_type.__init__

    @cache
    def block_of(shape: tuple[int, ...]) -> tuple[Any, ...]:
        made = object.__new__(core.block_type)
        make_block(made, core.int32, list(shape))
        return made.shape, made.numel, str(made.shape)

    @cache
    def tensor_of(shape: tuple[int, ...]) -> tuple[Any, ...]:
        made = object.__new__(core.tensor)
        make_tensor(made, None, core.block_type(core.int32, list(shape)) if shape else core.int32)
        return made.shape, made.numel

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel, described = block_of(tuple(core._unwrap_shape(shape)))
        self.name = f"<{described}, {element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensor_of(tuple(type.shape) if type.is_block() else ())

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


def _remember_types(interpreter: Any) -> None:
    """Every intermediate result builds Triton's table of NumPy's types anew."""
    find = interpreter._get_np_dtype
    known: dict[str, np.dtype[Any]] = {}

    def numpy_type(dtype: Any) -> np.dtype[Any]:
        scalar = dtype.scalar
        if scalar.name not in known:
            known[scalar.name] = find(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = numpy_type


def _check_overflow_in_numpy(interpreter: Any) -> None:
    """Whether a sum or a product of integers fits is computed by a dozen of Triton's functions: another third."""
    semantic = interpreter.TritonSemantic
    check = semantic.binary_op_sanitize_overflow_impl
    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def quick_check(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if not isinstance(self.builder, interpreter.InterpreterBuilder):
            check(self, lhs, rhs, binary_op)  # a kernel that is compiled
            return
        scalar = lhs.type.scalar
        if scalar.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
            return
        left, right = (each.handle.data.astype(np.int64) for each in (lhs, rhs))
        exact = operations[binary_op.__name__](left, right)
        fits = (exact >= scalar.get_int_min_value()) & (exact <= scalar.get_int_max_value())
        assert fits.all(), f"int{scalar.int_bitwidth} overflow detected for operation {binary_op.__name__}"

    semantic.binary_op_sanitize_overflow_impl = quick_check


@contextmanager
def without_overflow_checks() -> Iterator[None]:
    """Integers are added and multiplied once, not twice to see whether 64 bits give another result. For whole models:
    the tests of the kernels look for overflow."""
    interpreter = _interpreter()
    if interpreter is None:
        yield
        return
    builder = interpreter.interpreter_builder
    checked = builder.options
    builder.options = replace(checked, sanitize_overflow=False)
    try:
        yield
    finally:
        builder.options = checked
