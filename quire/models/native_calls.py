"""Native kernels as small programs, for modelling code without other values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from quire.attention.interface import AttentionStep
from quire.attention.native_backend import NativeAttentionStep, RecordedAttention
from quire.kernels.arguments import HeadWeights
from quire.kernels.cpu.recorder import (
    ROW_ALIGNMENT,
    TOKEN_IDS,
    Buffer,
    RecordedIndices,
    RecordedProgram,
    Recorder,
    Scratch,
    rounded_rows,
)
from quire.kernels.cpu.runtime import NativeRuntime
from quire.models.eager_calls import Attend, Compute, Layer, Lookup
from quire.quantization.interface import LinearMethod


class NativeCalls:
    """EagerCalls over recorded programs, which share their working memory."""

    rotates = True

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime
        self._scratch = Scratch()
        self._calls: list[_RecordedCall] = []

    def layers(self, layers: Sequence[Layer], first: Layer | None = None) -> Compute:
        def record(x: Buffer) -> list[Buffer]:
            if first is None:
                return [cast("Buffer", layer(x)) for layer in layers]
            between = cast("Buffer", first(x))
            return [between, *(cast("Buffer", layer(between)) for layer in layers)]

        call = self._call(record)
        return lambda x: call.compute([x])

    def lookup(self, method: LinearMethod, parameters: Any) -> Lookup:
        call = self._call(lambda indices: [cast("Buffer", method.lookup(parameters, indices))])
        return call.compute_rows

    def attention(self, heads: HeadWeights, behind: Sequence[Layer]) -> Attend:
        recorded: RecordedAttention | None = None
        calls: dict[bool, _RecordedCall] = {}

        def record(qkv: Buffer, rotation: Buffer | None = None) -> list[Buffer]:
            assert recorded is not None, "a program is recorded for a step"
            attended = recorded.attend(heads, qkv, rotation)
            return [attended, *(cast("Buffer", layer(attended)) for layer in behind)]

        def compute(qkv: torch.Tensor, rotation: torch.Tensor | None, step: AttentionStep) -> list[torch.Tensor]:
            nonlocal recorded
            assert isinstance(step, NativeAttentionStep), "a native model attends natively"
            if recorded is None or recorded.backend is not step.backend:
                recorded = RecordedAttention(step.backend)
                for each in calls.values():
                    each.release()
            call = calls.get(rotation is not None)
            if call is None:
                call = calls[rotation is not None] = self._call(record)
            return call.compute([qkv] if rotation is None else [qkv, rotation], step.plans)

        return compute

    def release(self) -> None:
        for call in self._calls:
            call.release()
        self._scratch.release()

    def _call(self, record: Callable[..., list[Buffer]]) -> _RecordedCall:
        call = _RecordedCall(record, self._runtime, self._scratch)
        self._calls.append(call)
        return call


class _RecordedCall:
    """A few operations as a program, recorded again for more rows. record: returns the placeholders of the results."""

    def __init__(self, record: Callable[..., list[Buffer]], runtime: NativeRuntime, scratch: Scratch) -> None:
        self._record = record
        self._runtime = runtime
        self._scratch = scratch
        self._program: RecordedProgram | None = None
        self._widths: list[int] = []

    def compute(self, inputs: Sequence[torch.Tensor], plans: Any = ()) -> list[torch.Tensor]:
        """Run the program. inputs: [T, width] float32 each. Rows of the results are aligned to cache lines."""
        num_rows = len(inputs[0])
        program = self._program
        if program is None or program.max_rows < num_rows:
            recorder = Recorder()
            buffers = [recorder.external(x.shape[1], _stride(x.shape[1])) for x in inputs]
            program = self._finish(recorder, buffers, num_rows)
        outs = [_empty_rows(num_rows, width) for width in self._widths]
        program.run(num_rows, plans=plans, externals=[*map(_aligned_rows, inputs), *outs])
        return outs

    def compute_rows(self, indices: torch.Tensor) -> torch.Tensor:
        num_rows = len(indices)
        program = self._program
        if program is None or program.max_rows < num_rows:
            recorder = Recorder()
            program = self._finish(recorder, [RecordedIndices(recorder, TOKEN_IDS)], num_rows)
        out = _empty_rows(num_rows, self._widths[0])
        program.run(num_rows, (indices.contiguous(),), externals=(out,))
        return out

    def release(self) -> None:
        self._program = None

    def _finish(self, recorder: Recorder, inputs: Sequence[Any], num_rows: int) -> RecordedProgram:
        self._program = None
        results = self._record(*inputs)
        self._widths = [result.width for result in results]
        for result in results:
            recorder.redirect(result, recorder.external(result.width, _stride(result.width)))
        self._program = recorder.finish_program(results[-1], self._runtime, rounded_rows(num_rows), self._scratch)
        return self._program


def _stride(width: int) -> int:
    return -(-width // ROW_ALIGNMENT) * ROW_ALIGNMENT


def _empty_rows(num_rows: int, width: int) -> torch.Tensor:
    rows = torch.empty(num_rows, _stride(width))
    return rows if rows.shape[1] == width else rows[:, :width]


def _aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """Same rows, each aligned to a cache line."""
    num_rows, width = x.shape
    if x.stride() == (_stride(width), 1):
        return x
    rows = _empty_rows(num_rows, width)
    rows.copy_(x)
    return rows
