"""Functions that all Triton kernels share: whether they run compiled or interpreted, products that are right in both,
and launches.

Compiled, a kernel runs on tensors of a GPU. With `TRITON_INTERPRET=1`, set before this is imported, Triton runs the
same source block by block in NumPy on host tensors, which is how its correctness is tested where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import numpy as np
import triton
import triton.language as tl

from quire import envs
from quire.kernels.triton.bound_launch import CompiledLaunches

INTERPRETED = tl.constexpr(envs.triton_interpret())

Grid: TypeAlias = tuple[int, ...]


def blocks_of(size: int, block: int) -> int:
    """Number of blocks that cover `size`. (Triton's own `cdiv` takes the host 2 us a call, which is half a launch.)"""
    return -(-size // block)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`, which is positive. (As above.)"""
    return 1 << (number - 1).bit_length()


class LaunchRecorder(Protocol):
    """Stands between `launch` and the kernels: what a capture of CUDA graphs does on a GPU, for tests on a host."""

    def launch(self, kernel: Any, grid: Grid, args: Sequence[Any], constants: Mapping[str, Any]) -> None:
        """Called instead of the kernel."""
        ...


_RECORDER: ContextVar[LaunchRecorder | None] = ContextVar("launch recorder", default=None)


def launch(kernel: Any, grid: Grid, /, *args: Any, **constants: Any) -> None:
    """`kernel[grid](*args, **constants)`: all launches of Triton kernels go through here or through `bind`, so that
    they can be recorded.

    grid: numbers of programs, up to three. args: tensors and numbers, in the kernel's order. constants: compile-time
    arguments and launch settings (`num_warps`, `num_stages`).
    """
    _unfixed(kernel, **constants)(grid, *args)


class BoundKernel:
    """A kernel with its compile-time arguments, and with those others that are the same at every launch.

    Calling it with a grid and the remaining arguments, in the kernel's order, is `kernel[grid](...)`. Fixed tensors
    stay alive and must stay where they are.
    """

    __slots__ = ("_compiled", "_fixed", "_open", "constants", "kernel")

    def __init__(self, kernel: Any, fixed: Mapping[str, Any], constants: Mapping[str, Any]) -> None:
        """fixed, constants: by the names of the kernel's parameters; constants may have launch settings as well."""
        self.kernel = kernel
        self.constants = dict(constants)
        names = [name for name in kernel.arg_names if name not in constants]
        self._open = [index for index, name in enumerate(names) if name not in fixed]
        self._fixed = [fixed.get(name) for name in names]
        assert fixed.keys() <= set(names), "a fixed argument is one of the kernel's"
        self._compiled = None if INTERPRETED else CompiledLaunches(kernel, fixed, constants)

    def __call__(self, grid: Grid, /, *args: Any) -> None:
        recorder = _RECORDER.get()
        if recorder is not None:
            recorder.launch(self.kernel, grid, self._completed(args), self.constants)
        elif self._compiled is None:
            self.kernel[grid](*self._completed(args), **self.constants)
        elif not self._compiled.launch(grid, args):
            self._compiled.add_compiled(args, self.kernel[grid](*self._completed(args), **self.constants))

    def _completed(self, args: Sequence[Any]) -> list[Any]:
        """All arguments in the kernel's order."""
        completed = list(self._fixed)
        for index, arg in zip(self._open, args, strict=True):
            completed[index] = arg
        return completed


def bind(kernel: Any, fixed: Mapping[str, Any], /, **constants: Any) -> BoundKernel:
    """A kernel with its fixed arguments, for callers that launch it again and again: see BoundKernel."""
    return BoundKernel(kernel, fixed, constants)


@lru_cache(maxsize=1024, typed=True)
def _unfixed(kernel: Any, **constants: Any) -> BoundKernel:
    return BoundKernel(kernel, {}, constants)


@contextmanager
def recorded_launches(recorder: LaunchRecorder | None) -> Iterator[None]:
    """While this is open, launches of this thread go to `recorder`; None: they run."""
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


@triton.jit
def compiled_dot(a, b, accumulator):
    """`dot`, on a GPU."""
    return tl.dot(a, b, accumulator, input_precision="ieee")


def interpreted_dot(a, b, accumulator):
    """`dot`, in the interpreter.

    tl.dot would hand the blocks to np.matmul, and with some BLAS a row's order of additions depends on its place in the
    block: the same row would have other bits in another batch, which no kernel here is to blame for. Here every element
    adds its products in order of k. And tl.dot would multiply the bits of bfloat16 as if they were integers.
    """
    rows, columns = (np.ascontiguousarray(block.to(tl.float32).handle.data) for block in (a, b))
    indices = "mk,kn->mn" if rows.ndim == 2 else "smk,skn->smn"
    products = np.einsum(indices, rows, columns, optimize=False)  # optimize=True would ask BLAS
    handle = type(accumulator.handle)(products + accumulator.handle.data, tl.float32)
    return tl.tensor(handle, accumulator.type)


dot = interpreted_dot if INTERPRETED else compiled_dot
"""accumulator + a @ b, added in float32. a: [M, K], b: [K, N] of one dtype, or stacks of such; float32 operands are
multiplied as such (no tf32). accumulator: float32, [M, N]."""


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """x, float32, in DTYPE: rounded to the nearest, ties to even."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        # The interpreter would cut the last bits off.
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


@triton.jit
def bound(scalar):
    """The scalar as `range` takes it for a start or an end that is computed on the device: itself. (NumPy no longer
    takes the interpreter's scalars, arrays of one element, for integers.)"""
    return int((scalar + tl.zeros((1,), tl.int32)).handle.data[0]) if INTERPRETED else scalar
