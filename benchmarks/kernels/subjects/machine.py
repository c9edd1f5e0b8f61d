"""The machine under test: its native kernels, its caches, and the loops that show its limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from itertools import cycle
from typing import TypeVar

import torch

from benchmarks.kernels.caches import last_level_cache_bytes
from benchmarks.kernels.measure import Runner
from benchmarks.kernels.run import BF16_PEAK, FLOAT_PEAK, INTEGER_PEAK, READ
from quire.kernels.cpu import _native
from quire.kernels.cpu.memory import allocate
from quire.kernels.cpu.recorder import FLOAT_BYTES, ROW_ALIGNMENT
from quire.kernels.cpu.runtime import NativeRuntime

T = TypeVar("T")

READ_BYTES = 512 << 20
READ_SLICE = 64 << 20
PEAK_UNITS = 64
CALL_SECONDS = 0.005
"""A run of a kernel is made of as many calls, over different operands, as take about this long."""
MAX_RUNS = 16
EXPECTED_READ = 20e9
EXPECTED_PEAK = 100e9
"""Bytes and operations a second that the number of calls is chosen by; nothing that is reported depends on them."""


class Machine:
    """The arguments are NativeRuntime's. Sets torch's threads to the same number."""

    def __init__(self, isa: str, num_threads: int, matmul_precision: str = "float32") -> None:
        self.runtime = NativeRuntime(isa, num_threads, matmul_precision)
        torch.set_num_threads(num_threads)
        self.cache_bytes = last_level_cache_bytes()

    def runtime_for(self, matmul_precision: str) -> NativeRuntime:
        """The same instruction set and the same threads, computing with this precision."""
        runtime = copy(self.runtime)
        runtime.matmul_precision = matmul_precision
        return runtime

    @property
    def cold_bytes(self) -> int:
        """Operands that are used in turn must take this much together, so that each one comes from memory."""
        return 2 * self.cache_bytes

    def num_copies(self, operand_bytes: int) -> int:
        """Copies of an operand that are used in turn."""
        return -(-self.cold_bytes // operand_bytes)

    def limits(self) -> Mapping[str, Runner]:
        """The limits' loops, by name."""
        isa, pool = self.runtime.isa, self.runtime.pool
        size = max(READ_BYTES, -(-4 * self.cache_bytes // READ_SLICE) * READ_SLICE)
        buffer = allocate(size)
        buffer.fill_(1)  # unwritten memory is one page of zeros, and that is in the caches
        slices = cycle(range(0, size, READ_SLICE))

        def read() -> int:
            _native.read_limit(isa, pool, buffer.data_ptr() + next(slices), READ_SLICE)
            return READ_SLICE

        def float_peak() -> int:
            return int(_native.float_limit(isa, pool, PEAK_UNITS * pool.threads))

        def integer_peak() -> int:
            return int(_native.integer_limit(isa, pool, PEAK_UNITS * pool.threads))

        def bf16_peak() -> int:
            return int(_native.bf16_limit(isa, pool, PEAK_UNITS * pool.threads))

        limits = {READ: read, FLOAT_PEAK: float_peak, INTEGER_PEAK: integer_peak}
        return {**limits, BF16_PEAK: bf16_peak} if _native.has_bf16_products(isa) else limits


def calls_per_run(copies: int, num_bytes: int, operations: int) -> int:
    """How many of `copies` calls make one run."""
    expected = num_bytes / EXPECTED_READ + operations / EXPECTED_PEAK
    return max(1, min(copies, round(CALL_SECONDS / expected)))


def in_turn(runs: Sequence[Runner]) -> Runner:
    """One of the runs after the other, for ever. Each is made once here, so that the system backs its scratch and its
    results now: on a virtual machine that takes as long as the kernels themselves."""
    for run_once in runs:
        run_once()
    order: Iterator[Runner] = cycle(runs)

    def run() -> int:
        return next(order)()

    return run


def parts(copies: Sequence[T], calls: int) -> list[Sequence[T]]:
    """Operands of successive runs, `calls` each. Not more runs than MAX_RUNS: long ones evict their own operands."""
    starts = range(0, len(copies) - calls + 1, calls)
    return [copies[start : start + calls] for start in starts[:MAX_RUNS]]


def aligned_rows(rows: int, width: int) -> torch.Tensor:
    """[rows, width] float32 of zeros; rows begin at multiples of ROW_ALIGNMENT, as kernels have them."""
    stride = -(-width // ROW_ALIGNMENT) * ROW_ALIGNMENT
    return allocate(rows * stride * FLOAT_BYTES).view(torch.float32).view(rows, stride)[:, :width]


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, as a share of the largest expected value; infinite when a NaN is among them."""
    difference = (result.double() - expected.double()).abs().max()
    error = float(difference / expected.double().abs().max())
    return math.inf if math.isnan(error) else error
