"""Operations of Triton's interpreter, planned once for all operands of the same types.

Triton derives types, shapes and conversions of an operation anew for each pair of operands, by dozens of Python calls
around one of NumPy. A plan keeps what they came to: NumPy types of the operands, NumPy's function, and the type of the
result. The first operands of a plan are computed by Triton itself and by the plan: a plan that gave other bits is not
used. All else (8-bit floats, bfloat16 but for its loads and stores, block pointers, errors) stays with Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
Function = Callable[..., Any]
MOST_PLANS = 50_000
"""Of one operation: then they are made anew. Constants make many."""
NOT_PLANNED = object()
WHOLE = slice(None)
NUMBERS = (int, float, bool)


class Like(NamedTuple):
    """A tensor without its data: type of the handle, and the tensor's fields."""

    handle_type: Any
    type: Any
    dtype: Any
    shape: Any
    numel: Any


def divide_down(left: Array, right: Array) -> Array:
    """Quotients of integers, as Triton's interpreter rounds them."""
    quotient: Array = (left - np.fmod(left, right)) // right
    return quotient


def moved(width: int, places: Array, offsets: Array) -> Array:
    """Pointers `offsets` elements of `width` bytes further on."""
    found: Array = places + width * offsets
    return found


def moved_by(width: int, offsets: Array, places: Array) -> Array:
    return moved(width, places, offsets)


ARITHMETIC: dict[str, Function] = {
    "__add__": np.add,
    "__sub__": np.subtract,
    "__mul__": np.multiply,
    "__truediv__": np.divide,
    "__floordiv__": divide_down,
    "__mod__": np.fmod,
    "__and__": np.bitwise_and,
    "__or__": np.bitwise_or,
    "__xor__": np.bitwise_xor,
    "__radd__": lambda left, right: right + left,
    "__rsub__": lambda left, right: right - left,
    "__rmul__": lambda left, right: right * left,
    "__rtruediv__": lambda left, right: right / left,
}
COMPARISONS: dict[str, Function] = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
CHECKED = {f"__{prefix}{name}__": name for prefix in ("", "r") for name in ("add", "sub", "mul")}
"""Operations whose overflow is an error, and their names in it."""
DIVISIONS = {"__truediv__", "__rtruediv__", "__floordiv__", "__mod__"}


def same_bits(found: Array, expected: Array) -> bool:
    return (found.dtype, found.shape) == (expected.dtype, expected.shape) and found.tobytes() == expected.tobytes()


class Operations:
    """Planned replacements of the builtins of `triton.language`."""

    def __init__(self, interpreter: Any) -> None:
        self.interpreter, self.core = interpreter, interpreter.tl.core
        self.semantic, self.builder = interpreter.interpreter_semantic, interpreter.interpreter_builder
        self.tensor, self.constexpr = self.core.tensor, self.core.constexpr
        kinds = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
        plain = [getattr(self.core, each) for each in ("int1", *kinds, "float16", "float32", "float64")]
        self.numpy_types = {each.name: interpreter._get_np_dtype(each) for each in plain}
        self.make = self._maker()

    def replacements(self) -> dict[Any, Function]:
        """Planned operations, by Triton's."""
        core, tensor = self.core, self.tensor
        found: dict[Any, Function] = {}
        for name, function in (ARITHMETIC | COMPARISONS).items():
            found[getattr(tensor, name)] = self._binary(name, function)
        for each in (core.arange, core.full):
            found[each] = self._constant(each)
        found |= {tensor.to: self._cast(), tensor.__getitem__: self._index(), core.where: self._where()}
        return found | {core.load: self._load(), core.store: self._store(), core.program_id: self._program_id()}

    def _maker(self) -> Function:
        new, handle_class, tensor_class = object.__new__, self.interpreter.TensorHandle, self.tensor

        def make(like: Like, data: Array) -> Any:
            handle, made = new(handle_class), new(tensor_class)
            handle.data, handle.attr = data, {}
            made.handle = handle
            handle.dtype, made.type, made.dtype, made.shape, made.numel = like
            return made

        return make

    def like(self, tensor: Any) -> Like:
        return Like(tensor.handle.dtype, tensor.type, tensor.dtype, tensor.shape, tensor.numel)

    def _converted(self, source: Any, target: Any) -> Any:
        """NumPy's type to convert values to; None where they are of the type, NOT_PLANNED where Triton converts."""
        if source == target:
            return None
        known = target.name != "int1" and source.name in self.numpy_types and target.name in self.numpy_types
        return self.numpy_types[target.name] if known else NOT_PLANNED

    # Operations on two values

    def _binary(self, name: str, function: Function) -> Function:
        slow, semantic, make = getattr(self.tensor, name).__wrapped__, self.semantic, self.make
        tensor, constexpr, plan_of, builder = self.tensor, self.constexpr, self._plan_binary, self.builder
        plans: dict[Any, Any] = {}
        checked_as = CHECKED.get(name)

        def call(lhs: Any, rhs: Any, _semantic: Any = None) -> Any:
            kind = type(rhs)
            if kind is constexpr:
                rhs = rhs.value
                kind = type(rhs)
            if kind is tensor:
                key: Any = (lhs.type.name, rhs.type.name)
            elif kind in NUMBERS:
                key = (lhs.type.name, kind, rhs)
            else:
                return slow(lhs, rhs, _semantic=semantic)
            plan = plans.get(key)
            if plan is None:
                result = slow(lhs, rhs, _semantic=semantic)
                if len(plans) > MOST_PLANS:
                    plans.clear()
                plans[key] = plan_of(name, function, lhs, rhs, result)
                return result
            if plan is NOT_PLANNED:
                return slow(lhs, rhs, _semantic=semantic)
            compute, left_type, right_type, constant, like, is_checked = plan
            left = lhs.handle.data
            if left_type is not None:
                left = left.astype(left_type)
            right = constant
            if right is None:
                right = rhs.handle.data
                if right_type is not None:
                    right = right.astype(right_type)
            found = compute(left, right)
            if is_checked and builder.options.sanitize_overflow:
                exact = compute(left.astype(np.int64), right.astype(np.int64))
                assert (exact == found).all(), f"{like[2]} overflow detected for operation {checked_as}"
            return make(like, found)

        return call

    def _plan_binary(self, name: str, function: Function, lhs: Any, rhs: Any, result: Any) -> Any:
        """For operands of which Triton has computed the result."""
        is_constant = type(rhs) in NUMBERS
        left, right = lhs.type.scalar, self.semantic.to_tensor(rhs).type.scalar
        if left.is_ptr() or right.is_ptr():
            if name != "__add__":
                return NOT_PLANNED
            kind, is_checked, is_number = left if left.is_ptr() else right, False, False
            width = max(1, kind.element_ty.primitive_bitwidth // 8)
            types: list[Any] = [None if each.is_ptr() else np.dtype(np.uint64) for each in (left, right)]
            compute: Function = partial(moved if left.is_ptr() else moved_by, width)
        else:
            is_number = is_constant and name not in COMPARISONS  # comparisons make tensors of numbers first
            common = self.semantic.computation_type_impl(left, False, right, is_number, name in DIVISIONS)
            if common.is_int() and name in ("__truediv__", "__rtruediv__"):
                common = self.core.float32
            types, compute = [self._converted(each, common) for each in (left, right)], function
            is_checked = name in CHECKED and common.is_int() and common.int_bitwidth < 64
            if NOT_PLANNED in types or common.name not in self.numpy_types:
                return NOT_PLANNED
        constant = None
        if is_constant:
            constant = self.semantic.to_tensor(rhs).handle.data
            constant = constant if types[1] is None else constant.astype(types[1])
            if is_number:
                constant = self.semantic.scalar_constant(rhs, common).handle.data
        first = lhs.handle.data if types[0] is None else lhs.handle.data.astype(types[0])
        second = constant
        if second is None:
            second = rhs.handle.data if types[1] is None else rhs.handle.data.astype(types[1])
        if not same_bits(compute(first, second), result.handle.data):
            return NOT_PLANNED
        return compute, *types, constant, self.like(result), is_checked

    def _where(self) -> Function:
        slow, semantic, make, tensor = self.core.where.__wrapped__, self.semantic, self.make, self.tensor
        plans: dict[Any, Any] = {}
        key_of, unwrap = self._key, self.core._unwrap_if_constexpr

        def converted(value: Any, kind: Any) -> Array:
            data: Array = value.handle.data
            return data if kind is None else data.astype(kind)

        def plan_of(condition: Any, values: tuple[Any, Any], result: Any) -> Any:
            common, types, constants = result.dtype, [], []
            if condition.dtype.name != "int1" or common.name not in self.numpy_types:
                return NOT_PLANNED
            for each in values:
                is_tensor = type(each) is tensor
                kind = self._converted(each.type.scalar, common) if is_tensor else None
                if kind is NOT_PLANNED:
                    return NOT_PLANNED
                types.append(kind)
                constants.append(None if is_tensor else semantic.scalar_constant(each, common).handle.data)
            plan = *types, *constants, self.like(result)
            return plan if same_bits(run(plan, condition, *values), result.handle.data) else NOT_PLANNED

        def run(plan: Any, condition: Any, x: Any, y: Any) -> Array:
            x_type, y_type, x_data, y_data, _ = plan
            if x_data is None:
                x_data = converted(x, x_type)
            if y_data is None:
                y_data = converted(y, y_type)
            found: Array = np.where(condition.handle.data, x_data, y_data)
            return found

        def call(condition: Any, x: Any, y: Any, _semantic: Any = None) -> Any:
            if type(condition) is not tensor:
                return slow(condition, x, y, _semantic=semantic)
            key = (condition.type.name, key_of(x), key_of(y))
            plan = plans.get(key)
            if plan is None or plan is NOT_PLANNED:
                result = slow(condition, x, y, _semantic=semantic)
                if plan is None:
                    plans[key] = plan_of(condition, (unwrap(x), unwrap(y)), result)
                return result
            return make(plan[-1], run(plan, condition, x, y))

        return call

    # Memory

    def _key(self, value: Any) -> Any:
        """The types of what an operation is given, and the values of constants. Raises KeyError for all else."""
        kind = type(value)
        if kind is self.tensor:
            return value.type.name
        if kind is self.constexpr:
            return self._key(value.value)
        if kind in NUMBERS:
            return kind, value
        if value is None or kind is str:
            return value
        if kind is self.core.dtype:
            return kind, value.name
        if kind in (tuple, list, self.core.tuple):
            return tuple([self._key(each) for each in value])
        raise KeyError(value)

    def _load(self) -> Function:
        slow, semantic, make, load = (
            self.core.load.__wrapped__,
            self.semantic,
            self.make,
            self.interpreter._interpreter.load,
        )
        plans: dict[Any, Any] = {}
        key_of, tensor = self._key, self.tensor

        def run(plan: Any, pointer: Any, mask: Any, other: Any) -> Array:
            element, shape, all_there, filling, filling_type, is_bool, _ = plan
            places = pointer.handle.data
            if places.shape != shape:
                places = np.broadcast_to(places, shape)
            there = all_there
            if there is None:
                there = mask.handle.data
                if there.shape != shape:
                    there = np.broadcast_to(there, shape)
            if filling is None:
                filling = other.handle.data
                if filling_type is not None:
                    filling = filling.astype(filling_type)
                if filling.shape != shape:
                    filling = np.broadcast_to(filling, shape)
            found: Array = load(places, there, filling, element)
            return found != 0 if is_bool else found

        def plan_of(pointer: Any, mask: Any, other: Any, result: Any) -> Any:
            if not pointer.type.scalar.is_ptr() or pointer.type.scalar.element_ty.is_block():
                return NOT_PLANNED
            kind, shape = pointer.type.scalar.element_ty, result.handle.data.shape
            kind = self.core.int8 if kind.name == "int1" else kind
            element = self.interpreter._get_np_dtype(kind)
            all_there = filling = filling_type = None
            if type(mask) is not tensor:
                all_there = np.full(shape, mask is None or bool(mask))
            if type(other) is tensor:
                filling_type = self._converted(other.type.scalar, kind)
                if filling_type is NOT_PLANNED:
                    return NOT_PLANNED
            else:
                value = semantic.cast(semantic.to_tensor(0 if other is None else other), kind).handle.data
                filling = np.full(shape, value[0], value.dtype)
            plan = element, shape, all_there, filling, filling_type, result.dtype.name == "int1", self.like(result)
            return plan if same_bits(run(plan, pointer, mask, other), result.handle.data) else NOT_PLANNED

        def call(
            pointer: Any, mask: Any = None, other: Any = None, *rest: Any, _semantic: Any = None, **options: Any
        ) -> Any:
            try:
                key = (key_of(pointer), key_of(mask), key_of(other), rest, *options.items())
                plan = plans.get(key)
            except (KeyError, TypeError):
                return slow(pointer, mask, other, *rest, _semantic=semantic, **options)
            if plan is None or plan is NOT_PLANNED:
                result = slow(pointer, mask, other, *rest, _semantic=semantic, **options)
                if plan is None:
                    unwrap = self.core._unwrap_if_constexpr
                    plans[key] = plan_of(pointer, unwrap(mask), unwrap(other), result)
                return result
            return make(plan[-1], run(plan, pointer, mask, other))

        return call

    def _store(self) -> Function:
        slow, semantic = self.core.store.__wrapped__, self.semantic
        store, load = self.interpreter._interpreter.store, self.interpreter._interpreter.load
        plans: dict[Any, Any] = {}
        key_of, tensor = self._key, self.tensor

        def run(plan: Any, pointer: Any, value: Any, mask: Any) -> None:
            shape, all_there, data, value_type = plan
            there = all_there
            if there is None:
                there = mask.handle.data
                if there.shape != shape:
                    there = np.broadcast_to(there, shape)
            if data is None:
                data = value.handle.data
                if value_type is not None:
                    data = data.astype(value_type)
                if data.shape != shape:
                    data = np.broadcast_to(data, shape)
            store(pointer.handle.data, data, there)

        def plan_of(pointer: Any, value: Any, mask: Any) -> Any:
            if not pointer.type.scalar.is_ptr() or pointer.type.scalar.element_ty.is_block():
                return NOT_PLANNED
            kind, shape = pointer.type.scalar.element_ty, pointer.handle.data.shape
            kind = self.core.int8 if kind.name == "int1" else kind
            all_there = data = value_type = None
            if type(mask) is not tensor:
                all_there = np.full(shape, mask is None or bool(mask))
            if type(value) is tensor:
                value_type = self._converted(value.type.scalar, kind)
                if value_type is NOT_PLANNED:
                    return NOT_PLANNED
            else:
                constant = semantic.cast(semantic.to_tensor(value), kind).handle.data
                data = np.full(shape, constant[0], constant.dtype)
            plan = shape, all_there, data, value_type
            element = self.interpreter._get_np_dtype(kind)
            there = all_there if all_there is not None else np.broadcast_to(mask.handle.data, shape)
            nothing = np.zeros(shape, element)
            written = load(pointer.handle.data, there, nothing, element)
            run(plan, pointer, value, mask)
            return plan if same_bits(load(pointer.handle.data, there, nothing, element), written) else NOT_PLANNED

        def call(pointer: Any, value: Any, mask: Any = None, *rest: Any, _semantic: Any = None, **options: Any) -> Any:
            try:
                key = (key_of(pointer), key_of(value), key_of(mask), rest, *options.items())
                plan = plans.get(key)
            except (KeyError, TypeError):
                return slow(pointer, value, mask, *rest, _semantic=semantic, **options)
            if plan is None or plan is NOT_PLANNED:
                result = slow(pointer, value, mask, *rest, _semantic=semantic, **options)
                if plan is None:
                    unwrap = self.core._unwrap_if_constexpr
                    plans[key] = plan_of(pointer, unwrap(value), unwrap(mask))
                return result
            run(plan, pointer, value, mask)
            return None

        return call

    # Operations on one value, and on none

    def functions(self) -> dict[Any, Function]:
        """Planned replacements of functions that are written in Triton."""
        standard = self.interpreter.tl.standard
        kinds = {standard.sum: np.add.reduce, standard.max: np.fmax.reduce, standard.min: np.fmin.reduce}
        return {function: self._reduce(function, compute) for function, compute in kinds.items()}

    def _reduce(self, function: Any, compute: Function) -> Function:
        """slow: Triton's function, called when a plan is made."""
        make, key_of, unwrap = self.make, self._key, self.core._unwrap_if_constexpr
        plans: dict[Any, Any] = {}

        def run(value: Any, axis: Any, keep_dims: bool, kind: Any) -> Array:
            data = value.handle.data
            found: Array = compute(data if kind is None else data.astype(kind), axis=axis, keepdims=keep_dims)
            return found if found.shape else np.array([found], found.dtype)

        def plan_of(value: Any, axis: Any, keep_dims: Any, result: Any) -> Any:
            axis, keep_dims = unwrap(axis), bool(unwrap(keep_dims))
            if type(result) is not self.tensor or result.dtype.name not in self.numpy_types:
                return NOT_PLANNED
            kind = self._converted(value.type.scalar, result.dtype)
            if kind is NOT_PLANNED or not same_bits(run(value, axis, keep_dims, kind), result.handle.data):
                return NOT_PLANNED
            return axis, keep_dims, kind, self.like(result)

        def call(slow: Function, value: Any, axis: Any = None, *rest: Any, keep_dims: Any = False, **named: Any) -> Any:
            if rest or named or type(value) is not self.tensor:
                return slow(value, axis, *rest, keep_dims=keep_dims, **named)
            key = (value.type.name, key_of(axis), key_of(keep_dims))
            plan = plans.get(key)
            if plan is None or plan is NOT_PLANNED:
                result = slow(value, axis, keep_dims=keep_dims)
                if plan is None:
                    plans[key] = plan_of(value, axis, keep_dims, result)
                return result
            axis, keep_dims, kind, like = plan
            return make(like, run(value, axis, keep_dims, kind))

        return call

    def _cast(self) -> Function:
        slow, semantic, make, core = self.tensor.to.__wrapped__, self.semantic, self.make, self.core
        plans: dict[Any, Any] = {}

        def call(value: Any, dtype: Any, *rest: Any, _semantic: Any = None, **options: Any) -> Any:
            dtype = core._unwrap_if_constexpr(dtype)
            if type(dtype) is not core.dtype or rest or options not in ({}, {"bitcast": True}):
                return slow(value, dtype, *rest, _semantic=semantic, **options)
            key = (value.type.name, dtype.name, *options)
            plan = plans.get(key)
            if plan is None or plan is NOT_PLANNED:
                result = slow(value, dtype, _semantic=semantic, **options)
                if plan is None:
                    plans[key] = plan_of(value, dtype, result, bool(options))
                return result
            kind, like, is_bitcast = plan
            data = value.handle.data
            if kind is None:
                return value
            return make(like, data.view(kind) if is_bitcast else data.astype(kind))

        def plan_of(value: Any, dtype: Any, result: Any, is_bitcast: bool) -> Any:
            kind = self._converted(value.type.scalar, dtype)
            if kind is None:
                return (kind, self.like(result), is_bitcast) if result is value else NOT_PLANNED
            if kind is NOT_PLANNED:
                return NOT_PLANNED
            data = value.handle.data.view(kind) if is_bitcast else value.handle.data.astype(kind)
            return (kind, self.like(result), is_bitcast) if same_bits(data, result.handle.data) else NOT_PLANNED

        return call

    def _index(self) -> Function:
        slow, semantic, make = self.tensor.__getitem__.__wrapped__, self.semantic, self.make
        plans: dict[Any, Any] = {}

        def call(value: Any, slices: Any, _semantic: Any = None) -> Any:
            if type(slices) is not tuple or not value.type.is_block():
                return slow(value, slices, _semantic=semantic)
            pattern = [
                "+" if each is None else ":" if type(each) is slice and each == WHOLE else "?" for each in slices
            ]
            if "?" in pattern:
                return slow(value, slices, _semantic=semantic)
            key = (value.type.name, *pattern)
            like = plans.get(key)
            if like is None or like is NOT_PLANNED:
                result = slow(value, slices, _semantic=semantic)
                if like is None:
                    is_same = same_bits(value.handle.data[slices], result.handle.data)
                    plans[key] = self.like(result) if is_same else NOT_PLANNED
                return result
            return make(like, value.handle.data[slices])

        return call

    def _constant(self, builtin: Any) -> Function:
        """An operation of constants alone; its results share their data, which no operation writes."""
        slow, semantic, make, key_of = builtin.__wrapped__, self.semantic, self.make, self._key
        plans: dict[Any, Any] = {}

        def call(*given: Any, _semantic: Any = None, **named: Any) -> Any:
            try:
                key = (key_of(given), *[(name, key_of(value)) for name, value in named.items()])
                plan = plans.get(key)
            except (KeyError, TypeError):
                return slow(*given, _semantic=semantic, **named)
            if plan is None:
                result = slow(*given, _semantic=semantic, **named)
                if any(type(each) is self.tensor for each in (*given, *named.values())):
                    return result
                result.handle.data.setflags(write=False)
                plans[key] = self.like(result), result.handle.data
                return result
            return make(*plan)

        return call

    def _program_id(self) -> Function:
        slow, semantic, make, builder = self.core.program_id.__wrapped__, self.semantic, self.make, self.builder
        like = Like(self.core.int32, *self.like(semantic.to_tensor(0))[1:])

        def call(axis: Any, _semantic: Any = None) -> Any:
            axis = self.core._unwrap_if_constexpr(axis)
            if axis not in (0, 1, 2) or builder.grid_idx is None:
                return slow(axis, _semantic=semantic)
            return make(like, np.array([builder.grid_idx[axis]], np.int32))

        return call
