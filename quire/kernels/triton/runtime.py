"""Common parts of Triton kernels: products, right in both modes, and launches. `TRITON_INTERPRET=1`, set before import,
runs the source in NumPy, for tests without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
import triton
import triton.language as tl

from quire import envs
from quire.kernels.triton.attention_tiles import DeviceLimits
from quire.kernels.triton.bound_launch import CompiledLaunches

INTERPRETED = tl.constexpr(envs.triton_interpret())

Grid: TypeAlias = tuple[int, ...]


def blocks_of(size: int, block: int) -> int:
    return -(-size // block)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


@lru_cache
def has_hopper_memory(device: torch.device) -> bool:
    """True on cards with Hopper's shared memory, and off cards."""
    if device.type != "cuda":
        return True
    capability = torch.cuda.get_device_capability(device)
    return capability >= (9, 0) and DeviceLimits(capability).shared_memory >= DeviceLimits().shared_memory


class LaunchRecorder(Protocol):
    """Replacement of launches that records them, as a CUDA graph capture does; for tests on a host."""

    def launch(self, kernel: Any, grid: Grid, args: Sequence[Any], constants: Mapping[str, Any]) -> None: ...


_RECORDER: ContextVar[LaunchRecorder | None] = ContextVar("launch recorder", default=None)


def launch(kernel: Any, grid: Grid, /, *args: Any, **constants: Any) -> None:
    """`kernel[grid](*args, **constants)`; all launches go through this or `bind`. grid: numbers of programs, up to
    three. args: in the kernel's order. constants: compile-time arguments and launch settings."""
    _unfixed(kernel, **constants)(grid, *args)


class BoundKernel:
    """Kernel with fixed arguments. A call with a grid and the other arguments, in order, is
    `kernel[grid](...)`. Fixed tensors stay alive and must not move."""

    __slots__ = ("_compiled", "_fixed", "_open", "constants", "kernel")

    def __init__(self, kernel: Any, fixed: Mapping[str, Any], constants: Mapping[str, Any]) -> None:
        """fixed, constants: by parameter name; constants may include launch settings."""
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
        completed = list(self._fixed)
        for index, arg in zip(self._open, args, strict=True):
            completed[index] = arg
        return completed


def bind(kernel: Any, fixed: Mapping[str, Any], /, **constants: Any) -> BoundKernel:
    return BoundKernel(kernel, fixed, constants)


@lru_cache(maxsize=1024, typed=True)
def _unfixed(kernel: Any, **constants: Any) -> BoundKernel:
    return BoundKernel(kernel, {}, constants)


@contextmanager
def recorded_launches(recorder: LaunchRecorder | None) -> Iterator[None]:
    """Send launches of this thread to `recorder` (None: run as usual)."""
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


@triton.jit
def compiled_dot(a, b, accumulator):
    """`dot` on a GPU."""
    return tl.dot(a, b, accumulator, input_precision="ieee")


def interpreted_dot(a, b, accumulator):
    """`dot` in the interpreter: adds products in order of k."""
    rows, columns = (np.ascontiguousarray(block.to(tl.float32).handle.data) for block in (a, b))
    indices = "mk,kn->mn" if rows.ndim == 2 else "smk,skn->smn"
    products = np.einsum(indices, rows, columns, optimize=False)  # optimize=True would ask BLAS
    handle = type(accumulator.handle)(products + accumulator.handle.data, tl.float32)
    return tl.tensor(handle, accumulator.type)


dot = interpreted_dot if INTERPRETED else compiled_dot
"""accumulator + a @ b in float32. a: [M, K], b: [K, N] of one dtype, or stacks; float32 operands are not rounded (no
tf32)."""


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """x, float32, rounded to DTYPE, ties to even."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        # The interpreter would cut the last bits off.
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


@triton.jit
def bound(scalar):
    """Scalar in a form that `range` accepts as a bound."""
    return int((scalar + tl.zeros((1,), tl.int32)).handle.data[0]) if INTERPRETED else scalar
