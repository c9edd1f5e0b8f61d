"""Recording a model's kernels once, so that a step is one native call.

A model is written once, as layers that pass values on. On the plain path the values are tensors. Here they are
placeholders: each layer adds a call to the recorder and gets the placeholder of its result. `finish` then gives every
placeholder a place in one arena (places are used again once their value was read for the last time) and makes a native
program, which any number of rows is run through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from quire.kernels.cpu import _native
from quire.kernels.cpu.memory import allocate
from quire.kernels.cpu.runtime import NativeRuntime

FLOAT_BYTES = 4
ROW_ALIGNMENT = 16
"""Rows begin at multiples of this many elements: a cache line."""
ARENA = 0
"""The area that placeholders live in; areas from 1 on are given to `RecordedProgram.run`."""


@dataclass(eq=False, slots=True)
class Buffer:
    """A matrix of float32 rows. area: where it lies (ARENA: the recorder finds a place). stride: elements from row
    to row."""

    recorder: Recorder
    width: int
    area: int
    stride: int
    offset: int = 0
    """Elements per row of the arena that lie before it; known after `finish_program`."""


@dataclass(frozen=True, slots=True)
class RecordedIndices:
    """The step's token ids or positions, plus `shift`."""

    recorder: Recorder
    by_position: bool
    shift: int = 0

    def __add__(self, shift: int) -> RecordedIndices:
        return RecordedIndices(self.recorder, self.by_position, self.shift + shift)


@dataclass(slots=True)
class Call:
    """One kernel: `kernel` of _native.Program with `buffers` (None: absent) and `constants`. over: the buffer whose
    place the output may take, or, if `in_place`, must take: the kernel then changes what is there."""

    kernel: str
    buffers: dict[str, Buffer | None]
    constants: dict[str, Any]
    out: Buffer
    over: Buffer | None = None
    in_place: bool = False


@dataclass(slots=True)
class Recorder:
    """Collects calls. `keep` holds what their addresses point to."""

    calls: list[Call] = field(default_factory=list)
    keep: list[object] = field(default_factory=list)
    num_areas: int = 1

    def external(self, width: int, stride: int) -> Buffer:
        """A buffer whose memory each run brings: the next area."""
        self.num_areas += 1
        return Buffer(self, width, self.num_areas - 1, stride)

    def redirect(self, buffer: Buffer, target: Buffer) -> None:
        """Let the call that makes `buffer` write to `target`'s memory."""
        buffer.area, buffer.stride = target.area, target.stride

    def call(
        self,
        kernel: str,
        width: int,
        /,
        *,
        over: Buffer | None = None,
        in_place: bool = False,
        buffers: dict[str, Buffer | None] | None = None,
        **constants: Any,
    ) -> Buffer:
        """Add a kernel; returns its output, `width` wide, which takes the place of `over` if no later kernel reads that
        (in_place: always; no later kernel may)."""
        out = Buffer(self, width, ARENA, -(-width // ROW_ALIGNMENT) * ROW_ALIGNMENT)
        self.calls.append(Call(kernel, buffers or {}, constants, out, over, in_place))
        return out

    def finish_program(self, result: Buffer, runtime: NativeRuntime, max_rows: int) -> RecordedProgram:
        """Place the buffers and build the program. result: kept whole to the end of a run."""
        elements = place_buffers(self.calls, result)
        program = _native.Program(runtime.isa, runtime.pool, max_rows, runtime.native_precision)
        absent = _native.Ref()
        for call in self.calls:
            refs = {name: absent if buffer is None else _ref(buffer, max_rows) for name, buffer in call.buffers.items()}
            getattr(program, call.kernel)(**call.constants, **refs, out=_ref(call.out, max_rows))
        return RecordedProgram(program, result, elements, max_rows, self.keep)


def place_buffers(calls: Sequence[Call], result: Buffer) -> int:
    """Set `offset` of every arena buffer; returns the elements per row of the arena that they take together.

    Buffers that live at the same time never overlap. A call's output takes the place of `over` if that is read for the
    last time there, else the first gap that is wide enough.
    """
    last_use: dict[Buffer, int] = {}
    for index, call in enumerate(calls):
        for buffer in (*call.buffers.values(), call.out, call.over):
            if buffer is not None:
                last_use[buffer] = index
    last_use[result] = len(calls)
    live: list[Buffer] = []
    size = 0
    for index, call in enumerate(calls):
        if call.out.area == ARENA and call.out not in live:
            over = call.over
            if over in live and last_use[over] == index and over is not result and over.stride == call.out.stride:
                call.out.offset = over.offset
                live.remove(over)
            else:
                assert not call.in_place, f"{call.kernel} changes a buffer that is still needed"
                call.out.offset = _first_gap(live, call.out.stride)
            live.append(call.out)
            size = max(size, call.out.offset + call.out.stride)
        live = [buffer for buffer in live if last_use[buffer] > index]
    return size


def _first_gap(live: Sequence[Buffer], width: int) -> int:
    start = 0
    for buffer in sorted(live, key=lambda buffer: buffer.offset):
        if buffer.offset - start >= width:
            return start
        start = max(start, buffer.offset + buffer.stride)
    return start


def _ref(buffer: Buffer, max_rows: int) -> _native.Ref:
    # Each buffer is max_rows rows in one piece, so `offset` elements per row before it are that many columns of rows.
    return _native.Ref(area=buffer.area, offset=buffer.offset * max_rows * FLOAT_BYTES, stride=buffer.stride)


class RecordedProgram:
    """A program with its arena. Not for two runs at a time."""

    def __init__(
        self, program: _native.Program, result: Buffer, elements: int, max_rows: int, keep: Sequence[object]
    ) -> None:
        self.max_rows = max_rows
        self._program = program
        self._keep = list(keep)
        self._arena = allocate(elements * max_rows * FLOAT_BYTES)
        self._scratch = allocate(program.scratch_bytes)
        self._areas = [self._arena.data_ptr() if elements else 0]
        self._scratch_address = self._scratch.data_ptr()
        if result.area == ARENA:
            first = result.offset * max_rows
            rows = self._arena.view(torch.float32)[first : first + max_rows * result.stride]
            self._result = rows.view(max_rows, result.stride)[:, : result.width]

    def run(
        self,
        num_rows: int,
        token_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        plans: Sequence[_native.AttentionPlan] = (),
        areas: Sequence[int] = (),
    ) -> None:
        """token_ids, positions: [num_rows] int64, contiguous. areas: addresses of the external buffers."""
        self._program.run(
            num_rows,
            0 if token_ids is None else token_ids.data_ptr(),
            0 if positions is None else positions.data_ptr(),
            plans,
            [*self._areas, *areas],
            self._scratch_address,
        )

    def result(self, num_rows: int) -> torch.Tensor:
        """[num_rows, width] float32 of the last run; overwritten by the next."""
        return self._result[:num_rows]
