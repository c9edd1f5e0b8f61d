"""Triton's interpreter, with what it repeats left out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from inspect import getmembers
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
    core = interpreter.tl.core
    _replace_once_in_a_launch(interpreter)
    _remember_builtins(interpreter)
    _unwrap_constants_alone(core)
    _describe_tuples_when_asked(core)
    _remember_shapes(core)
    _remember_types(interpreter)
    _leave_what_fits(interpreter)
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


def _remember_builtins(interpreter: Any) -> None:
    """Each launch lists all attributes of `triton.language` to find what it replaces, and each call of a replacement
    copies its keywords. One list is enough, and the keyword is set."""
    core, scopes = interpreter.tl.core, interpreter._LangPatchScope
    wrapper = core.builtin(lambda: None).__code__

    @cache
    def builtins_of(place: Any, semantic: Any) -> list[tuple[str, Any]]:
        found = [(name, member) for name, member in getmembers(place) if core.is_builtin(member)]
        return [(name, replacement(member, semantic)) for name, member in found]

    def replacement(member: Any, semantic: Any) -> Any:
        # The wrapper of Triton's decorator looks whether the keyword is there.
        function = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return call

    def replace_builtins(place: Any, builder: Any, scope: Any) -> None:
        assert isinstance(scope, scopes)
        assert builder is interpreter.interpreter_builder
        for name, call in builtins_of(place, interpreter.interpreter_semantic):
            scope.set_attr(place, name, call)

    interpreter._patch_builtin = replace_builtins


def _unwrap_constants_alone(core: Any) -> None:
    """Values are compared and passed on as what they are, most of which are no constants around another value."""
    constexpr, unwrap = core.constexpr, core._unwrap_if_constexpr
    plain = {int, float, bool, str, type(None), core.tensor, core.dtype, core.pointer_type, core.block_type}

    def quick_unwrap(value: Any) -> Any:
        kind = type(value)
        if kind is constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    def is_same_type(self: Any, other: Any) -> bool:
        if self is other:
            return True
        other = quick_unwrap(other)
        return isinstance(other, core.dtype) and self.name == other.name

    core._unwrap_if_constexpr = quick_unwrap
    core.dtype.__eq__ = is_same_type


def _describe_tuples_when_asked(core: Any) -> None:
    """Every shape is a tuple that describes the types of its numbers, which few ask for."""
    make, equal = core.tuple.__init__, core.tuple.__eq__

    def tuple_of(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.values = [*args]
        else:
            make(self, args, type)

    def get_type(self: Any) -> Any:
        if "described" not in self.__dict__:
            try:
                self.described = core._type_for_tuple_values(self.values)
            except AttributeError as error:  # of which Python would make a search for a field named "type", without end
                raise TypeError(f"a tuple of {self.values} has no type") from error
        return self.described

    def set_type(self: Any, type: Any) -> None:
        self.described = type

    def is_same_tuple(self: Any, other: Any) -> Any:
        return core.constexpr(self.values == other.values) if type(other) is core.tuple else equal(self, other)

    core.tuple.__init__, core.tuple.__eq__ = tuple_of, is_same_tuple
    core.tuple.type = property(get_type, set_type)


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

    def sizes(shape: Any) -> tuple[int, ...]:
        return tuple([core._unwrap_if_constexpr(each) for each in core._unwrap_if_constexpr(shape)])

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel, described = block_of(tuple(shape.values) if type(shape) is core.tuple else sizes(shape))
        self.name = f"<{described}, {element_ty.name}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensor_of(tuple(type.shape.values)) if type.is_block() else tensor_of(())

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


def _leave_what_fits(interpreter: Any) -> None:
    """Most operands have one type and one shape already: a dozen of Triton's functions need not find that out."""
    core, semantic = interpreter.tl.core, interpreter.TritonSemantic
    fit, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value

    def quick_broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        same = left.is_block() == right.is_block() and (not left.is_block() or left.shape.values == right.shape.values)
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    def quick_fit(self: Any, lhs: Any, rhs: Any, *rules: bool, **named: bool) -> Any:
        if len(rules) < 4 and not named and type(lhs) is core.tensor and type(rhs) is core.tensor:
            left, right = lhs.type.scalar, rhs.type.scalar
            if type(left) is core.dtype and type(right) is core.dtype and left.name == right.name:
                return self.broadcast_impl_value(lhs, rhs)
        return fit(self, lhs, rhs, *rules, **named)

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = quick_fit, quick_broadcast


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
