"""The small kernels between the matrices, beside the model's own torch operations: norms, rotary tables, embedding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.kernels.cases import BARRIER_WIDTH, KERNELS_PER_LAYER, KERNELS_PER_STEP, Case, Matrix, Work
from benchmarks.kernels.measure import Runner
from benchmarks.kernels.run import Prepared
from benchmarks.kernels.subjects.linear import STEP, WEIGHT_TYPES, drawn_values
from benchmarks.kernels.subjects.machine import Machine, aligned_rows, calls_per_run, relative_error
from quire.kernels.arguments import NormWeights, RotaryFrequencies
from quire.kernels.cpu import _native
from quire.kernels.cpu.packing import PackedMatrix
from quire.kernels.cpu.recorder import Buffer, RecordedIndices, Recorder
from quire.kernels.cpu.runtime import NativeRuntime
from quire.layers.native import NativeOperations
from quire.layers.operations import TorchOperations

MOST_CALLS = 100
EPSILON = 1e-5
TOLERANCE = 1e-5
ROTATION_TOLERANCE = 1e-3
"""Angles of thousands of radians are that coarse in float32."""
MAX_POSITION = 4096
ROTARY_BASE = 10000.0
VOCABULARY = 32768
"""Rows of the table that are looked up: more than the caches hold, few enough to be packed in a moment."""
TWINS = {"f32": torch.float32, "bf16": torch.bfloat16}

Record = Callable[[Recorder, Buffer], Buffer]
"""Adds one call, which reads the given rows or the step's token ids and positions; returns its result."""


class _SmallSubject:
    """Kernels whose operands are the rows of a step: they stay in the caches, as they do between two matrices."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def memory_bytes(self, case: Case) -> int:
        return 8 * case.rows * case.model.hidden * 4 + 2 * VOCABULARY * case.model.hidden * 6

    def _native(self, x: torch.Tensor, ids: torch.Tensor, work: Work, record: Record) -> tuple[Runner, torch.Tensor]:
        """A run of many calls, and where their results are. ids: token ids and positions, [T] int64."""
        recorder = Recorder()
        rows = aligned_rows(*x.shape)
        rows.copy_(x)
        source = recorder.external(rows.shape[1], rows.stride(0))
        calls = _calls(work)
        for _ in range(calls):
            result = record(recorder, source)
        program = recorder.finish_program(result, self._machine.runtime, len(x))

        def run() -> int:
            program.run(len(rows), (ids, ids), externals=[rows])
            return calls

        return run, program.result(len(x))


def _calls(work: Work) -> int:
    return calls_per_run(MOST_CALLS, work.bytes, work.float_operations)


def _repeated(compute: Callable[[], object], work: Work) -> Runner:
    calls = _calls(work)

    def run() -> int:
        for _ in range(calls):
            compute()
        return calls

    return run


def _prepared(
    natives: Mapping[str, tuple[Runner, torch.Tensor]],
    twins: Mapping[str, Runner],
    expected: torch.Tensor,
    tolerance: float,
) -> Prepared:
    errors = {}
    for name, (run, result) in natives.items():
        run()
        errors[name] = relative_error(result, expected)
    return Prepared(
        natives={name: run for name, (run, _) in natives.items()},
        twins=twins,
        errors=errors,
        tolerances=dict.fromkeys(natives, tolerance),
    )


class NormSubject(_SmallSubject):
    def prepare(self, case: Case) -> Prepared:
        work, size = case.variants["f32"], case.model.hidden
        x, ids = torch.randn(case.rows, size), torch.zeros(case.rows, dtype=torch.int64)
        weights = NormWeights(size, torch.rand(size) + 0.5, None, EPSILON, False)
        native = self._native(x, ids, work, lambda _, source: NativeOperations().norm(weights, source))
        plain = TorchOperations()
        twins = {}
        for name, dtype in TWINS.items():
            narrow = NormWeights(size, torch.rand(size).to(dtype), None, EPSILON, False)
            twins[name] = _repeated(partial(plain.norm, narrow, x.to(dtype)), work)
        return _prepared({"f32": native}, twins, plain.norm(weights, x), TOLERANCE)


class BarrierSubject(_SmallSubject):
    """The twin is the same program on one thread, which has no one to wait for."""

    def prepare(self, case: Case) -> Prepared:
        x = torch.randn(case.rows, BARRIER_WIDTH)
        weights = NormWeights(BARRIER_WIDTH, torch.rand(BARRIER_WIDTH) + 0.5, None, EPSILON, False)
        kernels = case.model.num_layers * KERNELS_PER_LAYER + KERNELS_PER_STEP
        step = self._step(x, weights, kernels, self._machine.runtime)
        twin, _ = self._step(x, weights, kernels, NativeRuntime(self._machine.runtime.isa, 1))
        return _prepared({"f32": step}, {"f32": twin}, TorchOperations().norm(weights, x), TOLERANCE)

    @staticmethod
    def _step(
        x: torch.Tensor, weights: NormWeights, kernels: int, runtime: NativeRuntime
    ) -> tuple[Runner, torch.Tensor]:
        recorder = Recorder()
        rows = aligned_rows(*x.shape)
        rows.copy_(x)
        source = recorder.external(rows.shape[1], rows.stride(0))
        for _ in range(kernels):
            result = NativeOperations().norm(weights, source)
        program = recorder.finish_program(result, runtime, len(x))

        def run() -> int:
            program.run(len(rows), externals=[rows])
            return 1

        return run, program.result(len(x))


class RotationSubject(_SmallSubject):
    def prepare(self, case: Case) -> Prepared:
        work, dim = case.variants["f32"], case.model.head_dim
        positions = torch.randint(0, MAX_POSITION, (case.rows,))
        turns = 1.0 / ROTARY_BASE ** (torch.arange(0, dim, 2).float() / dim)
        frequencies = RotaryFrequencies(turns, 1.0, torch.float32)

        def record(recorder: Recorder, _: Buffer) -> Buffer:
            return NativeOperations().rotation(frequencies, RecordedIndices(recorder, _native.SLOT_POSITIONS))

        native = self._native(torch.zeros(case.rows, 1), positions, work, record)
        plain = TorchOperations()
        twins = {"f32": _repeated(partial(plain.rotation, frequencies, positions), work)}
        angles = positions[:, None].double() * turns.double()
        expected = torch.cat((angles.cos(), angles.sin()), dim=1)
        return _prepared({"f32": native}, twins, expected, ROTATION_TOLERANCE)


class EmbedSubject(_SmallSubject):
    def prepare(self, case: Case) -> Prepared:
        size = case.model.hidden
        ids = torch.randint(0, VOCABULARY, (case.rows,))
        values = drawn_values(Matrix(VOCABULARY, size))
        table = values * STEP
        natives = {}
        for name, work in case.variants.items():
            packed = PackedMatrix(WEIGHT_TYPES[name], size, VOCABULARY)
            packed.load_dense(table)
            natives[name] = self._native(torch.zeros(case.rows, 1), ids, work, _lookup(packed))
        twins = {}
        for name, dtype in TWINS.items():
            work = next(iter(case.variants.values()))
            twins[name] = _repeated(partial(F.embedding, ids, table.to(dtype)), work)
        return _prepared(natives, twins, table[ids], 0.0)


def _lookup(table: PackedMatrix) -> Record:
    def record(recorder: Recorder, _: Buffer) -> Buffer:
        recorder.keep.append(table)
        return recorder.call(
            "embed",
            table.in_features,
            table=table.as_native(),
            width=table.in_features,
            shift=0,
            column=_native.TOKEN_IDS,
            accumulate=False,
        )

    return record
