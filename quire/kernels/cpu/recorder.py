"""Recording of a model's kernels, so a step is one native call. Layers pass on placeholders, kernels add calls;
`finish_program` makes a program for any number of rows."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from quire.kernels.cpu import _native
from quire.kernels.cpu.memory import allocate
from quire.kernels.cpu.runtime import NativeRuntime

FLOAT_BYTES = 4
TOKEN_IDS: int = _native.TOKEN_IDS
SLOT_POSITIONS: int = _native.SLOT_POSITIONS
ROW_ALIGNMENT = 16
"""Row alignment in elements: a cache line."""
ARENA = 0
"""Area of the placeholders; areas from 1 on are given to `RecordedProgram.run`."""
SMALLEST_PROGRAM = 64
"""Minimum rows; programs are made for powers of two of rows, to bound memory."""
GATHER = "gather"
"""Kernel after which a program runs only over the rows read."""


@dataclass(eq=False, slots=True)
class Buffer:
    """Placeholder for a matrix of float32 rows, one per token, in a recording. area: number of its memory (ARENA: the
    recorder assigns a place). stride: elements between rows."""

    recorder: Recorder
    width: int
    area: int
    stride: int
    is_gathered: bool = False
    """True if its rows are those read, else all rows of the step."""
    offset: int = 0
    """Offset in the arena, in elements per row; set by `finish_program`."""


@dataclass(frozen=True, slots=True)
class RecordedIndices:
    """Placeholder for a column of the step's tokens plus `shift`. column: TOKEN_IDS, SLOT_POSITIONS, then the model's
    other columns."""

    recorder: Recorder
    column: int
    shift: int = 0

    def __add__(self, shift: int) -> RecordedIndices:
        return RecordedIndices(self.recorder, self.column, self.shift + shift)


@dataclass(frozen=True, slots=True)
class RecordedRows:
    """Rows of a step whose hidden states are read, as a recording names them."""

    recorder: Recorder


TorchFunction = Callable[..., torch.Tensor]
"""Function from the inputs' rows, [rows, width] float32 tensors, to the output's."""


@dataclass(slots=True)
class KernelCall:
    """One recorded kernel: method `kernel` of _native.Program with `buffers` (None: absent) and `constants`, or a torch
    `function`. over: buffer whose place the output may take, or must if `in_place`. output: the output's parameter
    name. first_column: first column read of each buffer. out_column: first column written of the output and read of the
    residual."""

    kernel: str
    buffers: dict[str, Buffer | None]
    constants: dict[str, Any]
    out: Buffer
    over: Buffer | None = None
    in_place: bool = False
    output: str = "out"
    first_column: int = 0
    out_column: int = 0
    function: TorchFunction | None = None

    def column_of(self, buffer: str) -> int:
        """First column read of a buffer, by its parameter name."""
        return self.first_column + (self.out_column if buffer in (self.output, "residual") else 0)


@dataclass(slots=True)
class Recorder:
    """Collects kernel calls while a model's layers run on placeholders. `keep` holds what the calls' addresses point
    to."""

    calls: list[KernelCall] = field(default_factory=list)
    keep: list[object] = field(default_factory=list)
    num_areas: int = 1
    has_gathered: bool = False
    state_layers: list[int] = field(default_factory=list)
    """Layers whose states the calls use, in the order of a run's plan."""

    def external(self, width: int, stride: int) -> Buffer:
        """Buffer in the next area, whose memory each run brings."""
        self.num_areas += 1
        return Buffer(self, width, self.num_areas - 1, stride)

    def redirect(self, buffer: Buffer, target: Buffer) -> None:
        """Move `buffer`, and buffers that its call writes over, to `target`'s memory."""
        makers = {call.out: call for call in self.calls}
        over: Buffer | None = buffer
        while over is not None and over.area == ARENA:
            over.area, over.stride = target.area, target.stride
            below = makers[over].over
            is_shared = sum(below in call.buffers.values() for call in self.calls) > 1
            over = None if is_shared else below

    def call(
        self,
        kernel: str,
        width: int,
        /,
        *,
        over: Buffer | None = None,
        in_place: bool = False,
        output: str = "out",
        first_column: int = 0,
        out_column: int = 0,
        buffers: dict[str, Buffer | None] | None = None,
        **constants: Any,
    ) -> Buffer:
        """Add a kernel; returns its output of `width` columns, in the place of `over` if no later kernel reads `over`
        (in_place: always). For the rest see KernelCall."""
        out = self._output(width, buffers)
        call = KernelCall(kernel, buffers or {}, constants, out, over, in_place, output, first_column, out_column)
        self.calls.append(call)
        return call.out

    def state_layer(self, layer: int) -> int:
        """Index of `layer`'s states in a run's plan (StatePlans)."""
        if layer not in self.state_layers:
            self.state_layers.append(layer)
        return self.state_layers.index(layer)

    def gather(self, x: Buffer) -> Buffer:
        """Rows of `x` that are read, in its place. Everything recorded later has only these."""
        assert not x.is_gathered, "rows are gathered once"
        self.has_gathered = True
        out = self._output(x.width, {})
        self.calls.append(KernelCall(GATHER, {}, {"width": x.width}, out, over=x, in_place=True, output="x"))
        return out

    def call_torch(self, function: TorchFunction, width: int, inputs: Sequence[Buffer]) -> Buffer:
        """Add a callback without a kernel: `function` of the inputs' rows returns the output's, `width` columns."""
        buffers: dict[str, Buffer | None] = {str(index): buffer for index, buffer in enumerate(inputs)}
        out = self._output(width, buffers)
        self.calls.append(KernelCall("torch", buffers, {}, out, function=function))
        return out

    def finish_program(
        self,
        result: Buffer,
        runtime: NativeRuntime,
        max_rows: int,
        scratch: Scratch | None = None,
        arena: Scratch | None = None,
        others: Sequence[Buffer] = (),
    ) -> RecordedProgram:
        """Place the buffers and build the program. result, others: buffers kept to a run's end. scratch: kernels'
        working memory; arena: placeholders' memory; shared between programs (None: own). Any of these programs can
        overwrite a result in a shared arena: `redirect` it."""
        results = (result, *others)
        calls = hand_over_rows(fuse_norms(fuse_adapters(self.calls, results), results), results)
        elements = place_buffers(calls, results)
        absent = _native.Ref()
        program = _native.Program(runtime.isa, runtime.pool, max_rows, runtime.native_precision)
        for call in calls:
            refs = {
                name: absent if buffer is None else _ref(buffer, max_rows, call.column_of(name))
                for name, buffer in call.buffers.items()
            }
            refs[call.output] = _ref(call.out, max_rows, call.column_of(call.output))
            if call.function is None:
                getattr(program, call.kernel)(**call.constants, **refs)
            else:
                program.outside(TorchCall(call.function, [*call.buffers.values(), call.out]), list(refs.values()))
        memory = arena or Scratch(), scratch or Scratch()
        return RecordedProgram(program, results, elements, max_rows, self.keep, *memory)

    def _output(self, width: int, buffers: dict[str, Buffer | None] | None) -> Buffer:
        for buffer in (buffers or {}).values():
            assert buffer is None or buffer.is_gathered == self.has_gathered, "all rows meet the rows that are read"
        return Buffer(self, width, ARENA, -(-width // ROW_ALIGNMENT) * ROW_ALIGNMENT, self.has_gathered)


class TorchCall:
    """Torch function that a native program calls; keeps its last views of the float32 input and output rows."""

    def __init__(self, function: TorchFunction, buffers: Sequence[Buffer | None]) -> None:
        """buffers: inputs, then the output."""
        self._function = function
        self._sizes = [(buffer.width, buffer.stride) for buffer in buffers if buffer is not None]
        self._place: tuple[int, list[int]] = (0, [])
        self._rows: list[torch.Tensor] = []

    def __call__(self, num_rows: int, addresses: list[int]) -> None:
        """Run the function. addresses: first row of each buffer."""
        if self._place != (num_rows, addresses):
            self._place = (num_rows, addresses)
            self._rows = [
                _rows_at(address, num_rows, *size) for address, size in zip(addresses, self._sizes, strict=True)
            ]
        *inputs, out = self._rows
        out.copy_(self._function(*inputs))


def _rows_at(address: int, num_rows: int, width: int, stride: int) -> torch.Tensor:
    """[num_rows, width] float32, `stride` elements apart, over memory that the caller keeps."""
    memory = (ctypes.c_float * ((num_rows - 1) * stride + width)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.float32).as_strided((num_rows, width), (stride, 1))


def address_of(vector: torch.Tensor | None) -> int:
    if vector is None:
        return 0
    assert vector.dtype == torch.float32, "kernels take float32 vectors"
    assert vector.is_contiguous(), "in one piece"
    return vector.data_ptr()


def rounded_rows(num_rows: int) -> int:
    """Rows (a power of two) that a program for `num_rows` is made for, so few sizes are recorded."""
    return max(SMALLEST_PROGRAM, 1 << (num_rows - 1).bit_length())


def fuse_norms(calls: Sequence[KernelCall], results: Sequence[Buffer]) -> list[KernelCall]:
    """Merge a norm into the linear layer that is its only reader: the same bits with less memory traffic. results:
    buffers kept."""
    num_readers = _count_readers(calls)
    fused: list[KernelCall] = []
    for call in calls:
        norm = fused[-1] if fused else None
        if norm is not None and _is_input_norm(norm, call) and num_readers[norm.out] == 1 and norm.out not in results:
            names = ("weight", "bias", "epsilon", "subtract_mean")
            row_norm = _native.RowNorm(**{name: norm.constants[name] for name in names})
            buffers, constants = call.buffers | {"x": norm.buffers["x"]}, call.constants | {"norm": row_norm}
            fused[-1] = replace(call, buffers=buffers, constants=constants)
        else:
            fused.append(call)
    return fused


def fuse_adapters(calls: Sequence[KernelCall], results: Sequence[Buffer]) -> list[KernelCall]:
    """Let a linear layer add its adapters' results itself, before its activation. results: buffers kept."""
    num_readers = _count_readers(calls)
    fused: list[KernelCall] = []
    for call in calls:
        linear, shrink = fused[-2:] if len(fused) > 1 else (None, None)
        if linear is not None and shrink is not None and _is_expansion_of(call, shrink, linear, num_readers):
            adapters = {name: call.constants[name] for name in ("table", "column")} | {"gated": False}
            buffers, constants = linear.buffers | {"inner": shrink.out}, linear.constants | adapters
            whole = replace(linear, kernel="adapted_linear", buffers=buffers, constants=constants, out=call.out)
            fused[-2:] = [shrink, whole]
        elif fused and _activates(call, fused[-1], num_readers) and fused[-1].out not in results:
            activated = {"activation": call.constants["activation"], "gated": call.constants["up"] != 0}
            fused[-1] = replace(fused[-1], constants=fused[-1].constants | activated, out=call.out)
        else:
            fused.append(call)
    return fused


def _is_expansion_of(call: KernelCall, shrink: KernelCall, linear: KernelCall, num_readers: Counter[Buffer]) -> bool:
    return (
        (linear.kernel, shrink.kernel, call.kernel) == ("linear", "adapter_shrink", "adapter_expand")
        and call.over is linear.out
        and call.buffers["inner"] is shrink.out
        and shrink.buffers["x"] is linear.buffers["x"]
        and num_readers[linear.out] == 1
        and not linear.in_place
        and linear.out_column == linear.first_column == 0
        and call.constants["table"].fits_panels
    )


def _activates(call: KernelCall, linear: KernelCall, num_readers: Counter[Buffer]) -> bool:
    return (
        (linear.kernel, call.kernel) == ("adapted_linear", "activate")
        and (call.constants["up"] == 0 or call.constants["step"] == 2 * call.constants["up"])
        and call.buffers["x"] is linear.out
        and num_readers[linear.out] == 1
        and linear.buffers["residual"] is None
    )


def hand_over_rows(calls: Sequence[KernelCall], results: Sequence[Buffer]) -> list[KernelCall]:
    """Mark linear layers that only the next one reads, so kernels choose the output's layout. results: buffers kept."""
    num_readers = _count_readers(calls)
    handed = list(calls)
    for place, (call, following) in enumerate(pairwise(calls)):
        out = call.out
        if out in results or out.area != ARENA or num_readers[out] != 1:
            continue
        reads_rows = following.buffers.get("x") is out and following.buffers.get("residual") is not out
        if (call.kernel, following.kernel) == ("linear", "linear") and reads_rows:
            handed[place] = replace(call, constants=call.constants | {"feeds_next": True})
    return handed


def _count_readers(calls: Sequence[KernelCall]) -> Counter[Buffer]:
    return Counter(buffer for call in calls for buffer in {*call.buffers.values(), call.over} if buffer is not None)


def _is_input_norm(norm: KernelCall, call: KernelCall) -> bool:
    return (
        (norm.kernel, call.kernel) == ("norm", "linear")
        and not norm.in_place
        and call.buffers["x"] is norm.out
        and norm.out.area == ARENA
        and norm.out.width <= _native.MAX_NORMED_FEATURES
        and call.over is not norm.buffers["x"]
        and call.out.area == ARENA
    )


def place_buffers(calls: Sequence[KernelCall], results: Sequence[Buffer]) -> int:
    """Set `offset` of every arena buffer. Returns total elements per row. Buffers that live at once do not overlap."""
    last_use: dict[Buffer, int] = {}
    for index, call in enumerate(calls):
        for buffer in (*call.buffers.values(), call.out, call.over):
            if buffer is not None:
                last_use[buffer] = index
    last_use |= dict.fromkeys(results, len(calls))
    live: list[Buffer] = []
    size = 0
    for index, call in enumerate(calls):
        if call.out.area == ARENA and call.out not in live:
            over = call.over
            if over in live and last_use[over] == index and over.stride == call.out.stride:
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


def _ref(buffer: Buffer, max_rows: int, first_column: int) -> _native.Ref:
    # Each buffer is max_rows rows in one piece, so `offset` elements per row before it are that many columns of rows.
    first = buffer.offset * max_rows + first_column
    return _native.Ref(area=buffer.area, offset=first * FLOAT_BYTES, stride=buffer.stride)


class Scratch:
    """Working memory that programs of a model share, one at a time."""

    def __init__(self) -> None:
        self._memory = allocate(0)

    @property
    def address(self) -> int:
        return self._memory.data_ptr()

    def floats(self, first: int, count: int) -> torch.Tensor:
        """`count` float32 from index `first` on; invalid once the memory has grown."""
        return self._memory.view(torch.float32)[first : first + count]

    def reserve(self, num_bytes: int) -> None:
        if num_bytes > len(self._memory):
            self._memory = allocate(num_bytes)

    def release(self) -> None:
        """Free the memory; programs that use it must be recorded again."""
        self._memory = allocate(0)


class FirstRows:
    """View of a matrix's first rows, cached while steps have equal sizes."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = self._first = rows
        self._count = len(rows)

    def get(self, count: int) -> torch.Tensor:
        if count != self._count:
            self._first, self._count = self.rows[:count], count
        return self._first


class RecordedProgram:
    """Recorded native program over an arena of placeholders' memory (`elements` per row). One run at a time."""

    def __init__(
        self,
        program: _native.Program,
        results: Sequence[Buffer],
        elements: int,
        max_rows: int,
        keep: Sequence[object],
        arena: Scratch,
        scratch: Scratch,
    ) -> None:
        self.max_rows = max_rows
        self._program = program
        self._keep = list(keep)
        arena.reserve(elements * max_rows * FLOAT_BYTES)
        self._arena = arena
        scratch.reserve(program.scratch_bytes)
        self._scratch = scratch
        self._results = [(self._rows_of(each), each.is_gathered) for each in results if each.area == ARENA]

    def run(
        self,
        num_rows: int,
        columns: Sequence[torch.Tensor | None] = (),
        plans: Sequence[_native.AttentionPlan] | _native.EncoderPlan = (),
        externals: Sequence[torch.Tensor] = (),
        read_rows: torch.Tensor | None = None,
        states: _native.StatePlan | None = None,
    ) -> None:
        """Run the program. columns: by number, [num_rows] int64, contiguous; None: unused. plans: one per KV group, or
        the plan of a step without a KV pool. externals: rows of the external buffers, float32. read_rows: [R] int64,
        contiguous, ascending, rows that gathers keep (None: all). states: plan of `state_layers` (None: none)."""
        self.bind(num_rows, columns, plans, externals, read_rows, states)()

    def bind(
        self,
        num_rows: int,
        columns: Sequence[torch.Tensor | None] = (),
        plans: Sequence[_native.AttentionPlan] | _native.EncoderPlan = (),
        externals: Sequence[torch.Tensor] = (),
        read_rows: torch.Tensor | None = None,
        states: _native.StatePlan | None = None,
    ) -> Callable[[], None]:
        """Function that runs the program over these arguments' memory, valid while the caller keeps it and shared
        working memory does not grow."""
        addresses = [0 if column is None else column.data_ptr() for column in columns]
        areas = [self._arena.address, *(rows.data_ptr() for rows in externals)]
        read_address, num_read = (0, 0) if read_rows is None else (read_rows.data_ptr(), len(read_rows))
        groups, encoder = ((), plans) if isinstance(plans, _native.EncoderPlan) else (plans, None)
        step = (num_rows, addresses, groups, areas, self._scratch.address)
        run: Callable[[], None] = self._program.bind(*step, read_address, num_read, states, encoder)
        return run

    def result(self, num_rows: int) -> torch.Tensor:
        """[num_rows, width] float32 of the last run; the next overwrites it."""
        return self._results[0][0].get(num_rows)

    def results(self, num_rows: int, num_read: int) -> list[torch.Tensor]:
        """Rows of all kept buffers, in the order of `finish_program`: [num_rows, width] each, [num_read, width] after a
        gather. The next run overwrites them."""
        return [rows.get(num_read if is_gathered else num_rows) for rows, is_gathered in self._results]

    def _rows_of(self, buffer: Buffer) -> FirstRows:
        rows = self._arena.floats(buffer.offset * self.max_rows, self.max_rows * buffer.stride)
        return FirstRows(rows.view(self.max_rows, buffer.stride)[:, : buffer.width])
