"""Linear layers: packed weights of every type beside torch's own product with float32 and bfloat16 weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.kernels.cases import INT4_GROUP, LINEAR_TYPES, Case, LinearType, Matrix, Work, matrices
from benchmarks.kernels.measure import Runner
from benchmarks.kernels.run import Prepared
from benchmarks.kernels.subjects.machine import (
    Machine,
    aligned_rows,
    calls_per_run,
    in_turn,
    parts,
    relative_error,
)
from quire.kernels.cpu import _native
from quire.kernels.cpu.memory import allocate
from quire.kernels.cpu.packing import Arena, PackedMatrix
from quire.kernels.cpu.recorder import Recorder
from quire.kernels.cpu.runtime import NativeRuntime
from quire.quantization.quantize_floats import quantize_mxfp4

STEP = 2.0**-9
"""Weights are MULTIPLES of it and their negatives: every type stores them exactly, so all have one right result."""
MULTIPLES = (0, 1, 2, 3, 4, 6)
INT4_ZERO = 8
DISTINCT_ROWS = 1024
WEIGHT_TYPES = {
    "f32": _native.WeightType.F32,
    "bf16": _native.WeightType.BF16,
    "f16": _native.WeightType.F16,
    "w16a16": _native.WeightType.BF16,
    "int8": _native.WeightType.I8,
    "w8a8": _native.WeightType.I8,
    "int4": _native.WeightType.I4,
    "w4a8": _native.WeightType.I4,
    "fp8": _native.WeightType.E4M3,
    "mxfp4": _native.WeightType.MXFP4,
}
TWINS = {"f32": torch.float32, "bf16": torch.bfloat16}
TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-2, "int8": 3e-2}
"""By what activations are rounded to. bfloat16: 1/512 of each value. 8 bits: 1/254 of a row's largest value each. Both
gathered over the row; SiLU and product double it."""
CHECKED_ROWS = 8


@dataclass(slots=True)
class Weights:
    """One matrix in copies that are used in turn. values: [out_features, in_features] int8, the weights in STEPs."""

    matrix: Matrix
    values: torch.Tensor
    packed: dict[str, list[PackedMatrix]] = field(default_factory=dict)
    dense: dict[str, torch.Tensor] = field(default_factory=dict)


class LinearSubject:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._key: tuple[str, str] | None = None
        self._weights: Weights | None = None

    def memory_bytes(self, case: Case) -> int:
        matrix = matrices(case.model)[case.shape]
        size = matrix.out_features * matrix.in_features
        packed = sum(self._copied_bytes(work.bytes) for work in case.variants.values())
        # The twins' weights, the values they are made of, and what a call leaves behind.
        rows = 3 * case.rows * (matrix.out_features + matrix.in_features) * 4
        return packed + self._copied_bytes(4 * size) + self._copied_bytes(2 * size) + size + rows

    def prepare(self, case: Case) -> Prepared:
        weights = self._weights_of(case)
        matrix = weights.matrix
        x = torch.randn(case.rows, matrix.in_features)
        twins = {name: self._twin(weights, name, x) for name in TWINS}
        chosen = torch.arange(case.rows)[-CHECKED_ROWS:]
        expected = _product(x[chosen], weights.dense["f32"][0], matrix)
        natives: dict[str, Runner] = {}
        errors: dict[str, float] = {}
        tolerances: dict[str, float] = {}
        for name, work in case.variants.items():
            if name not in weights.packed:
                weights.packed[name] = self._pack(weights, name, work)
            activations = LINEAR_TYPES[name].activations
            runtime = self._machine.runtime_for("bfloat16" if activations == "bfloat16" else "float32")
            calls = _Calls(runtime, weights.packed[name], x, work)
            natives[name] = in_turn(calls.runs)
            calls.runs[0]()
            errors[name] = relative_error(calls.out[chosen], expected)
            tolerances[name] = TOLERANCES[activations]
        return Prepared(natives, twins, errors, tolerances)

    def _copied_bytes(self, num_bytes: int) -> int:
        return num_bytes * self._machine.num_copies(num_bytes)

    def _weights_of(self, case: Case) -> Weights:
        """Those of the case before, if they are of the same matrix; types that it does not name go."""
        key = (case.model.name, case.shape)
        if self._weights is None or self._key != key:
            self._weights = None
            matrix = matrices(case.model)[case.shape]
            self._weights = Weights(matrix, drawn_values(matrix))
            self._key = key
        for name in set(self._weights.packed) - set(case.variants):
            del self._weights.packed[name]
        return self._weights

    def _pack(self, weights: Weights, name: str, work: Work) -> list[PackedMatrix]:
        arena = Arena()  # as a model's matrices lie
        copies = [packed(weights.matrix, weights.values, name, arena)]
        for _ in range(self._machine.num_copies(work.bytes) - 1):
            copies.append(_copy_of(copies[0], weights.matrix, name, arena))
        return copies

    def _twin(self, weights: Weights, name: str, x: torch.Tensor) -> Runner:
        if name not in weights.dense:
            weights.dense[name] = self._dense(weights, TWINS[name])
        dense, rows = weights.dense[name], x.to(TWINS[name])
        calls = calls_per_run(len(dense), dense[0].nbytes, 2 * x.shape[0] * dense[0].numel())

        def runner(group: Sequence[torch.Tensor]) -> Runner:
            def run() -> int:
                for weight in group:
                    _product(rows, weight, weights.matrix)
                return len(group)

            return run

        return in_turn([runner(group) for group in parts(list(dense), calls)])

    def _dense(self, weights: Weights, dtype: torch.dtype) -> torch.Tensor:
        """[copies, out_features, in_features]."""
        num_bytes = weights.values.numel() * dtype.itemsize
        copies = self._machine.num_copies(num_bytes)
        dense = allocate(copies * num_bytes).view(dtype).view(copies, *weights.values.shape)
        dense[0].copy_(weights.values).mul_(STEP)
        dense[1:] = dense[0]
        return dense


class _Calls:
    """Programs over successive copies of a packed matrix, all of the same rows."""

    def __init__(self, runtime: NativeRuntime, copies: Sequence[PackedMatrix], x: torch.Tensor, work: Work) -> None:
        rows, width = x.shape[0], copies[0].out_features // (2 if copies[0].gated else 1)
        self._x = aligned_rows(*x.shape)
        self._x.copy_(x)
        self.out = aligned_rows(rows, width)
        """Of the last call."""
        calls = calls_per_run(len(copies), work.bytes, work.operations)
        self.runs = [self._runner(runtime, part) for part in parts(copies, calls)]

    def _runner(self, runtime: NativeRuntime, copies: Sequence[PackedMatrix]) -> Runner:
        recorder = Recorder()
        x = recorder.external(self._x.shape[1], self._x.stride(0))
        target = recorder.external(self.out.shape[1], self.out.stride(0))
        for matrix in copies:
            out = recorder.call(
                "linear",
                target.width,
                buffers={"x": x, "residual": None},
                weight=matrix.as_native(),
                bias=0,
                activation=_native.Activation.SILU if matrix.gated else _native.Activation.NONE,
            )
            recorder.redirect(out, target)
        recorder.keep += copies
        rows, calls = len(self._x), len(copies)
        program = recorder.finish_program(out, runtime, rows)

        def run() -> int:
            program.run(rows, externals=[self._x, self.out])
            return calls

        return run


def packed(matrix: Matrix, values: torch.Tensor, name: str, arena: Arena) -> PackedMatrix:
    """A matrix of `values` times STEP, stored as LINEAR_TYPES[name]."""
    result = _empty(matrix, name, arena)
    kind = LINEAR_TYPES[name]
    if not kind.group:
        for start in range(0, matrix.out_features, DISTINCT_ROWS):
            rows = values[start : start + DISTINCT_ROWS]
            result.load_dense(rows * STEP, start)
        return result
    groups = result.num_groups
    if name == "mxfp4":
        for start in range(0, matrix.out_features, DISTINCT_ROWS):
            stored_rows = quantize_mxfp4(values[start : start + DISTINCT_ROWS] * STEP, name=name)
            result.load_float4(stored_rows.pairs, stored_rows.scale_codes, None, start)
        return result
    scales = torch.full((matrix.out_features, groups), STEP)
    if name == "fp8":
        result.load_float8(values.to(torch.float8_e4m3fn), scales)
        return result
    offsets = torch.full_like(scales, -INT4_ZERO * STEP) if kind.offsets else None
    stored = values if kind.bits == 8 else (values + INT4_ZERO).to(torch.uint8)
    result.load_integer(stored, scales, offsets)
    return result


def _empty(matrix: Matrix, name: str, arena: Arena) -> PackedMatrix:
    kind: LinearType = LINEAR_TYPES[name]
    options: dict[str, Any] = {"memory": arena.allocate}
    if name == "fp8":
        options["group_size"] = None
    elif kind.group and name != "mxfp4":
        options |= {
            "group_size": INT4_GROUP if kind.bits == 4 else None,
            "integer_activations": kind.activations == "int8",
            "with_offsets": kind.offsets,
        }
    return PackedMatrix(WEIGHT_TYPES[name], matrix.in_features, matrix.out_features, gated=matrix.gated, **options)


def _copy_of(packed: PackedMatrix, matrix: Matrix, name: str, arena: Arena) -> PackedMatrix:
    copy = _empty(matrix, name, arena)
    for part in ("data", "scales", "offsets", "column_sums", "scale_codes"):
        source = getattr(packed, part)
        if source is not None:
            getattr(copy, part).copy_(source)
    return copy


def _product(x: torch.Tensor, weight: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """What one call computes, in torch."""
    result = F.linear(x, weight)
    if not matrix.gated:
        return result
    gate, up = result.chunk(2, dim=-1)
    return F.silu(gate) * up


def drawn_values(matrix: Matrix) -> torch.Tensor:
    """[out_features, in_features] int8. Rows repeat after a while: drawing a large matrix would take seconds."""
    distinct = min(matrix.out_features, DISTINCT_ROWS)
    multiples = torch.tensor(sorted({sign * size for sign in (-1, 1) for size in MULTIPLES}), dtype=torch.int8)
    rows = multiples[torch.randint(len(multiples), (distinct, matrix.in_features))]
    return rows.repeat(-(-matrix.out_features // distinct), 1)[: matrix.out_features].contiguous()
