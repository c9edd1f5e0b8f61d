"""Triton's interpreter, with what it repeats left out."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from inspect import getmembers
from itertools import product
from typing import Any

import numpy as np

from tests.quick_operations import Operations


def _interpreter() -> Any:
    """None in a process that has not imported it."""
    return sys.modules.get("triton.runtime.interpreter")


def install() -> None:
    """Once in a process, when Triton has been imported."""
    interpreter = _interpreter()
    if interpreter is None or hasattr(interpreter, "replaced_now"):
        return
    core = interpreter.tl.core
    operations = Operations(interpreter)
    _replace_once(interpreter)
    _launch_on_the_host(interpreter, operations)
    interpreter.planned = operations.replacements()
    _remember_builtins(interpreter, interpreter.planned)
    _leave_tensors(interpreter)
    _call_at_once(interpreter, operations.functions())
    _unwrap_constants_alone(core)
    _describe_tuples_when_asked(core)
    _remember_shapes(core)
    _remember_types(interpreter)
    _leave_what_fits(interpreter)
    _check_overflow_in_numpy(interpreter)


def _replace_once(interpreter: Any) -> None:
    """On every call of one Triton function by another the interpreter searches all of `triton.language`, to replace the
    same functions by the same ones, and behind a launch it undoes some of that. Replacements stay until a kernel is
    compiled."""
    from triton.compiler import ASTSource

    replace_functions = interpreter._patch_lang
    replaced: set[tuple[bool, ...]] = set()
    found: dict[tuple[bool, ...], list[tuple[Any, str, Any]]] = {}
    originals: dict[tuple[int, str], Any] = {}
    interpreter.replaced_now = replaced

    @cache
    def modules_of(function: Any) -> tuple[bool, ...]:
        seen = {id(value) for value in function.__globals__.values()}
        return tuple(id(module) in seen for module in (interpreter.tl, interpreter.tl.core))

    def replace_once(function: Any) -> Any:
        modules = modules_of(function)
        if modules not in replaced:
            replaced.add(modules)
            if modules not in found:
                changes = replace_functions(function)._changes
                for place, name, original in changes:
                    originals.setdefault((id(place), name), original)
                found[modules] = [(place, name, getattr(place, name)) for place, name, _ in changes]
            for place, name, replacement in found[modules]:
                setattr(place, name, replacement)
        return nothing_to_restore

    def undo() -> None:
        for modules in replaced:
            for place, name, _ in found[modules]:
                original = originals[id(place), name]
                if original is not interpreter._MISSING:
                    setattr(place, name, original)
                elif name in vars(place):
                    delattr(place, name)
        replaced.clear()

    nothing_to_restore = interpreter._LangPatchScope()
    interpreter._patch_lang = replace_once
    make_ir = ASTSource.make_ir

    def make_ir_of_builtins(self: Any, *given: Any, **named: Any) -> Any:
        undo()
        return make_ir(self, *given, **named)

    ASTSource.make_ir = make_ir_of_builtins


def _launch_on_the_host(interpreter: Any, operations: Operations) -> None:
    """A launch over tensors of the host, which need no copies. Signatures and types of arguments are read once."""
    import torch

    launch, convert = interpreter.GridExecutor.__call__, interpreter._implicit_cvt
    signatures, types = cache(inspect.signature), {}
    plain = {int, float, bool, str, type(None), interpreter.tl.constexpr, interpreter.tl.dtype, torch.dtype}

    def kind_of(argument: Any) -> Any:
        """Arguments of one kind have the same Triton type."""
        if isinstance(argument, torch.Tensor):
            return argument.dtype
        bounds = (-(2**63), -(2**31), 2**31, 2**32, 2**63, 2**64)
        return type(argument), sum(argument >= bound for bound in bounds)

    def converted(argument: Any) -> Any:
        if not isinstance(argument, (int, torch.Tensor)):
            return convert(argument)
        kind = kind_of(argument)
        if kind not in types:
            made = convert(argument)
            types[kind] = operations.like(made), made.handle.data.dtype
            return made
        like, numpy_type = types[kind]
        value = argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
        return operations.make(like, np.array([value], numpy_type))

    def is_on_host(argument: Any) -> bool:
        return type(argument) in plain or (isinstance(argument, torch.Tensor) and argument.device.type == "cpu")

    def launch_quickly(self: Any, *given: Any, **named: Any) -> Any:
        if self.pre_run_hooks or not all(map(is_on_host, (*given, *named.values()))):
            return launch(self, *given, **named)
        signature = signatures(self.fn)
        bound = signature.bind(*given, **{name: value for name, value in named.items() if name in signature.parameters})
        bound.apply_defaults()
        builder = interpreter.interpreter_builder
        interpreter._patch_lang(self.fn)
        arguments = {
            name: value if name in self.constexprs else converted(value) for name, value in bound.arguments.items()
        }
        grid = self.grid(arguments) if callable(self.grid) else self.grid
        assert len(grid) <= 3, "grid must have at most 3 dimensions"
        builder.set_grid_dim(*grid, *[1] * (3 - len(grid)))
        try:
            for place in product(*map(range, builder.grid_dim)):
                builder.set_grid_idx(*place)
                self.fn(**arguments)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__ = launch_quickly


def _remember_builtins(interpreter: Any, planned: dict[Any, Any]) -> None:
    """Each launch lists all attributes of `triton.language` to find what it replaces, and each call of a replacement
    copies its keywords. One list is enough, and the keyword is set."""
    core, scopes = interpreter.tl.core, interpreter._LangPatchScope
    wrapper = core.builtin(lambda: None).__code__

    @cache
    def builtins_of(place: Any, semantic: Any) -> list[tuple[str, Any]]:
        found = [(name, member) for name, member in getmembers(place) if core.is_builtin(member)]
        return [(name, replacement(member, semantic)) for name, member in found]

    def replacement(member: Any, semantic: Any) -> Any:
        if member in planned:
            return planned[member]
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


def _leave_tensors(interpreter: Any) -> None:
    """Every assignment makes a tensor of its value, which most are already."""
    semantic, tensor = interpreter.TritonSemantic, interpreter.tl.core.tensor
    make = semantic.to_tensor

    def to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
        return x if type(x) is tensor else make(self, x, check_type)

    semantic.to_tensor = to_tensor


def _call_at_once(interpreter: Any, planned: dict[Any, Any]) -> None:
    """A function that another one calls is looked for among those that were rewritten, each time."""
    functions = interpreter.InterpretedFunction

    def call(self: Any, *given: Any, **named: Any) -> Any:
        quick = planned.get(self)
        return call_slowly(self, *given, **named) if quick is None else quick(self.call_slowly, *given, **named)

    def call_slowly(self: Any, *given: Any, **named: Any) -> Any:
        interpreter._patch_lang(self.fn)
        rewritten = self.__dict__.get("rewritten")
        if rewritten is None:
            rewritten = self.rewritten = self.rewrite()
        try:
            return rewritten(*given, **named)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    functions.__call__, functions.call_slowly = call, call_slowly


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
