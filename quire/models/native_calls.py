"""Native kernels one by one, for modelling code that only knows tensors. A model of Quire's own is recorded whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from quire.attention.interface import PlannedStep
from quire.attention.native_backend import NativeAttentionStep
from quire.kernels.cpu import _native
from quire.kernels.cpu.recorder import (
    ROW_ALIGNMENT,
    Buffer,
    RecordedIndices,
    RecordedProgram,
    Recorder,
    Scratch,
    rounded_rows,
)
from quire.kernels.cpu.runtime import NativeRuntime
from quire.layers.context import LayerContext
from quire.layers.operations import HeadWeights
from quire.models.eager_calls import Attend, Linear, Lookup
from quire.quantization.interface import LayerLinear


class NativeCalls:
    """Instance of EagerCalls for a context that records: each operation is a program of its own, and all share their
    working memory."""

    def __init__(self, context: LayerContext, runtime: NativeRuntime) -> None:
        self._operations = context.operations
        self._runtime = runtime
        self._scratch = Scratch()
        self._calls: list[_RecordedCall] = []

    def linear(self, method: LayerLinear, parameters: Any) -> Linear:
        return self._call(lambda x: cast("Buffer", method.apply(parameters, x))).run

    def lookup(self, method: LayerLinear, parameters: Any) -> Lookup:
        call = self._call(lambda indices: cast("Buffer", method.lookup(parameters, indices)))
        return call.run_indices

    def attend(self, heads: HeadWeights) -> Attend:
        backend: Any = None
        call: _RecordedCall | None = None

        def attend(qkv: torch.Tensor, step: PlannedStep) -> torch.Tensor:
            nonlocal backend, call
            assert isinstance(step, NativeAttentionStep), "a native model attends natively"
            if call is None or backend is not step.backend:
                backend = step.backend
                call = self._call(lambda x: cast("Buffer", self._operations.attend(heads, x, None, backend)))
            return call.run(qkv, step.plans)

        return attend

    def release(self) -> None:
        for call in self._calls:
            call.release()
        self._scratch.release()

    def _call(self, record: Callable[[Any], Buffer]) -> _RecordedCall:
        call = _RecordedCall(record, self._runtime, self._scratch)
        self._calls.append(call)
        return call


class _RecordedCall:
    """One operation as a program, recorded anew for more rows. record: gives the output's placeholder."""

    def __init__(self, record: Callable[[Any], Buffer], runtime: NativeRuntime, scratch: Scratch) -> None:
        self._record = record
        self._runtime = runtime
        self._scratch = scratch
        self._program: RecordedProgram | None = None
        self._width = 0

    def run(self, x: torch.Tensor, plans: Any = ()) -> torch.Tensor:
        """x: [T, width] float32."""
        num_rows, width = x.shape
        x = _aligned_rows(x)
        program = self._program
        if program is None or program.max_rows < num_rows:
            recorder = Recorder()
            program = self._finish(recorder, recorder.external(width, x.stride(0)), num_rows)
        out = _empty_rows(num_rows, self._width)
        program.run(num_rows, plans=plans, externals=(x, out))
        return out[:, : self._width].contiguous()

    def run_indices(self, indices: torch.Tensor) -> torch.Tensor:
        """indices: [T] int64."""
        num_rows = len(indices)
        program = self._program
        if program is None or program.max_rows < num_rows:
            recorder = Recorder()
            program = self._finish(recorder, RecordedIndices(recorder, _native.IndexSource.TOKEN_IDS), num_rows)
        out = _empty_rows(num_rows, self._width)
        program.run(num_rows, token_ids=indices.contiguous(), externals=(out,))
        return out[:, : self._width].contiguous()

    def release(self) -> None:
        self._program = None

    def _finish(self, recorder: Recorder, value: Any, num_rows: int) -> RecordedProgram:
        result = self._record(value)
        self._width = result.width
        recorder.redirect(result, recorder.external(result.width, _stride(result.width)))
        self._program = recorder.finish_program(result, self._runtime, rounded_rows(num_rows), self._scratch)
        return self._program


def _stride(width: int) -> int:
    return -(-width // ROW_ALIGNMENT) * ROW_ALIGNMENT


def _empty_rows(num_rows: int, width: int) -> torch.Tensor:
    return torch.empty(num_rows, _stride(width))


def _aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """The same rows, each at a multiple of a cache line."""
    width = x.shape[1]
    if width % ROW_ALIGNMENT == 0:
        return x.contiguous()
    rows = _empty_rows(len(x), width)
    rows[:, :width] = x
    return rows
