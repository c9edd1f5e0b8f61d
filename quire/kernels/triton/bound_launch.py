"""Launches of compiled kernels without Triton's dispatch (10 to 30 us). Triton launches unknown combinations first."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, reduce
from operator import attrgetter, itemgetter, or_
from typing import Any, TypeAlias

import torch
import triton
from triton import knobs
from triton.runtime.driver import driver

from quire.logging import get_logger

logger = get_logger(__name__)
ALIGNMENT = 16
"""Alignment in bytes, and factor of integers, that Triton specialises on."""
Launcher: TypeAlias = tuple[Callable[..., object], tuple[Any, ...]]
"""Launcher and its settings: called as (three grid sizes, stream, *settings, one argument per parameter; compile-time
ones are ignored)."""
_BELOW = ALIGNMENT - 1
_POINTERS_OF = torch.Tensor.data_ptr
_DTYPE_OF = attrgetter("dtype")
_HOOKS = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)


_OTHER_ARGUMENTS = "its launchers take other arguments than those that this version of Quire knows"


class UnknownLauncherError(Exception):
    """Error of a kernel's launcher that cannot be called directly; says why."""


class CompiledLaunches:
    """Compiled kernels of one call site. Pointers are unchecked after the first launch of a kind: a host tensor then
    faults. While a profiler hooks into Triton's launches, Triton launches."""

    __slots__ = ("_fixed", "_kinds", "_last", "_open", "_parameters", "is_tritons")

    def __init__(self, kernel: Any, fixed: Mapping[str, Any], constants: Mapping[str, Any]) -> None:
        """kernel: JITFunction. The rest: see BoundKernel."""
        self._parameters = list(kernel.params)
        self._fixed: dict[int, Any] = {}
        self._open: list[int] = []
        for index, parameter in enumerate(self._parameters):
            if parameter.name in constants:
                self._fixed[index] = None
            elif parameter.name in fixed:
                value = fixed[parameter.name]
                self._fixed[index] = value.data_ptr() if isinstance(value, torch.Tensor) else value
            else:
                self._open.append(index)
        self._kinds: dict[tuple[type, ...], _Kind] = {}
        self._last: _Kind | None = None
        self.is_tritons = False

    def launch(self, grid: Sequence[int], args: tuple[Any, ...]) -> bool:
        """Enqueue the kernel if one compiled for such arguments is known; returns whether it is."""
        kinds = (*map(type, args),)
        kind = self._last
        if kind is None or kind.kinds != kinds:
            kind = self._kinds.get(kinds)
            if kind is None:
                return False
            self._last = kind
        if _HOOKS[0].calls or _HOOKS[1].calls:
            return False
        tensors, numbers = kind.tensors(args), kind.numbers(args)
        pointers = (*map(_POINTERS_OF, tensors),)
        active = driver.active
        device = active.get_current_device()
        key = kind.key(device, tensors, pointers, numbers)
        known, launcher = kind.last
        if known != key:
            launcher = kind.compiled.get(key)
            if launcher is None:
                return False
            kind.last = key, launcher
        enqueue, settings = launcher
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        enqueue(x, y, z, active.get_current_stream(device), *settings, *kind.order(kind.fixed + pointers + numbers))
        return True

    def add_compiled(self, args: tuple[Any, ...], compiled: Any) -> None:
        """Keep `compiled`, which Triton has launched with `args`. If it cannot be called directly, log that, set
        `is_tritons`, and let Triton launch."""
        if self.is_tritons:
            return
        try:
            launcher = launcher_of(compiled, len(self._parameters))
        except UnknownLauncherError as error:
            self.is_tritons = True
            _report_launches_by_triton(triton.__version__, str(error))
            return
        kinds = tuple(map(type, args))
        if kinds not in self._kinds:
            self._kinds[kinds] = _Kind(self._parameters, self._fixed, self._open, kinds)
        kind = self._kinds[kinds]
        tensors = kind.tensors(args)
        pointers = tuple(map(_POINTERS_OF, tensors))
        key = kind.key(driver.active.get_current_device(), tensors, pointers, kind.numbers(args))
        kind.compiled[key] = launcher


class _Kind:
    """Arguments of one combination of types. tensors, numbers: pickers for these among open arguments (None is a
    number). fixed: other parameters' values. order: maps fixed + pointers + numbers to parameter order. compiled:
    launchers by `key`."""

    __slots__ = (
        "_aligned",
        "_literal",
        "_numbers",
        "compiled",
        "fixed",
        "kinds",
        "last",
        "numbers",
        "order",
        "tensors",
    )

    def __init__(
        self, parameters: Sequence[Any], fixed: Mapping[int, Any], unfixed: Sequence[int], kinds: Sequence[type]
    ) -> None:
        self.kinds = tuple(kinds)
        is_tensor = [issubclass(kind, torch.Tensor) for kind in kinds]
        tensors = [index for index, tensor in zip(unfixed, is_tensor, strict=True) if tensor]
        numbers = [index for index, tensor in zip(unfixed, is_tensor, strict=True) if not tensor]
        self.tensors = _picker([unfixed.index(index) for index in tensors])
        self.numbers = _picker([unfixed.index(index) for index in numbers])
        self.fixed = tuple(fixed.values())
        places = [*fixed, *tensors, *numbers]
        self.order = _picker([places.index(index) for index in range(len(parameters))])
        self._aligned = _picker(
            [at for at, index in enumerate(tensors) if not parameters[index].do_not_specialize_on_alignment]
        )
        self._literal = tuple(parameters[index].is_constexpr for index in numbers)
        self._numbers: tuple[tuple[Any, ...], tuple[Any, ...]] = ((), ())
        self.compiled: dict[tuple[Any, ...], Launcher] = {}
        self.last: tuple[object, Any] = (None, None)

    def key(
        self, device: int, tensors: tuple[Any, ...], pointers: tuple[int, ...], numbers: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Dictionary key of a launch, equal only if Triton compiles the same kernel."""
        # Numbers usually equal the last call's: layers differ only in pointers. One assignment sets both parts,
        # so that a thread never sees the numbers of one thread with the classes of another.
        last, classes = self._numbers
        if numbers != last:
            classes = (*map(_class_of, numbers, self._literal),)
            self._numbers = numbers, classes
        aligned = self._aligned(pointers)
        if reduce(or_, aligned, 0) & _BELOW:
            return device, classes, *map(_DTYPE_OF, tensors), *map(_BELOW.__and__, aligned)
        return device, classes, *map(_DTYPE_OF, tensors)


def _class_of(number: Any, is_literal: bool) -> object:
    """Properties of a number argument for which Triton specialises a kernel."""
    if is_literal:
        return number
    if type(number) is not int:
        return None  # the type decides alone
    if number == 1:
        return 1
    return number % ALIGNMENT == 0, -(2**31) <= number < 2**31, number < 2**63


def _picker(indices: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    if not indices:
        return lambda items: ()
    if len(indices) == 1:
        (index,) = indices
        return lambda items: (items[index],)
    return itemgetter(*indices)


def launcher_of(compiled: Any, num_parameters: int) -> Launcher:
    """Launcher of a CompiledKernel launched once. Raises UnknownLauncherError."""
    launcher, handed = compiled.run, list[tuple[Any, ...]]()
    if getattr(launcher, "global_scratch_size", 0) or getattr(launcher, "profile_scratch_size", 0):
        raise UnknownLauncherError("kernels want scratch memory, which Triton allocates for each launch")
    place, arguments = [object() for _ in range(4)], [object() for _ in range(num_parameters)]
    no_metadata_and_hooks = (None, None, None)
    try:
        watched = copy.copy(launcher)
        watched.launch = lambda *args: handed.append(args)
        watched(*place, compiled.function, compiled.packed_metadata, *no_metadata_and_hooks, *arguments)
        ((*given,),) = handed
        enqueue: Callable[..., object] = launcher.launch
    except (AttributeError, TypeError, ValueError) as error:
        raise UnknownLauncherError(_OTHER_ARGUMENTS) from error
    end = len(given) - num_parameters
    settings = tuple(given[4:end])
    if not (_are(given[:4], place) and _are(given[end:], arguments)) or _contains(settings, {*place, *arguments}):
        raise UnknownLauncherError(_OTHER_ARGUMENTS)
    return enqueue, settings


def _are(values: Sequence[object], others: Sequence[object]) -> bool:
    return len(values) == len(others) and all(value is other for value, other in zip(values, others, strict=True))


def _contains(settings: Iterable[object], marks: set[object]) -> bool:
    return any(
        _contains(each, marks) if isinstance(each, list | tuple) else any(each is mark for mark in marks)
        for each in settings
    )


@cache
def _report_launches_by_triton(version: str, reason: str) -> None:
    logger.warning("Triton %s launches kernels itself, at 10 to 30 us of the host each: %s", version, reason)
