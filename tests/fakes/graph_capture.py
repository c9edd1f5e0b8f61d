"""CUDA graphs on a host: a capture records torch's operators and Triton's launches with their very tensors, a replay
runs those again. As unforgiving as a device:

- what is recorded is not run: tensors from outside are not written, and what a capture allocates holds garbage until a
  replay has computed it;
- whatever the host does with values meanwhile stays as it was;
- graphs share their memory: a replay spoils what the others left, except those that it continues;
- asking for a value, or making a tensor from one, is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from quire.kernels.triton.runtime import Grid, recorded_launches

FORBIDDEN = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "lift_fresh", "masked_select", "equal", "unique")
"""Operators that wait for the device, or copy from memory of the host."""
GARBAGE = {True: float("nan"), False: 77}
"""What uncomputed memory holds, by whether it is a floating-point number."""


class CaptureError(RuntimeError):
    """What a device would refuse during a capture, or compute wrongly."""


@dataclass
class _Operation:
    function: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    fresh: list[tuple[int, torch.Tensor]]
    """(index, result) for results in memory of their own."""


@dataclass
class _Launch:
    kernel: Any
    grid: Grid
    args: Sequence[Any]
    constants: Mapping[str, Any]


@dataclass
class _Family:
    """Graphs that continue one another. owned: storages that their captures have allocated, by address."""

    owned: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    tensors: list[torch.Tensor] = field(default_factory=list)

    def spoil(self) -> None:
        for tensor in self.tensors:
            spoil(tensor)


class RecordedGraph:
    def __init__(self, capture: RecordingCapture) -> None:
        self._capture = capture
        self.family = _Family()
        self.entries: list[_Operation | _Launch] = []
        self.num_replays = 0

    @property
    def launches(self) -> list[_Launch]:
        return [entry for entry in self.entries if isinstance(entry, _Launch)]

    def replay(self) -> None:
        self.num_replays += 1
        self._capture.before_replay(self.family)
        for entry in self.entries:
            if isinstance(entry, _Launch):
                entry.kernel[entry.grid](*entry.args, **entry.constants)
                continue
            results = tree_flatten(entry.function(*entry.args, **entry.kwargs))[0]
            for index, recorded in entry.fresh:
                if entry.function.overloadpacket.__name__.startswith(("empty", "new_empty")):
                    spoil(recorded)
                else:
                    recorded.copy_(results[index])


class RecordingCapture:
    """Implements GraphCapture. graphs: those that were made."""

    def __init__(self, fail_after: int | None = None, room: int = 0) -> None:
        """fail_after: captures that succeed before memory is out. room: how many more do once `make_room` was called.
        num_rooms: how often it was."""
        self._left = fail_after
        self._room = room
        self.num_rooms = 0
        self._families: list[_Family] = []
        self._current: tuple[RecordedGraph, ExitStack] | None = None
        self.graphs: list[RecordedGraph] = []

    def begin_capture(self) -> None:
        assert self._current is None
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise torch.OutOfMemoryError("CUDA out of memory")
        graph, stack = RecordedGraph(self), ExitStack()
        self._families.append(graph.family)
        self._current = graph, stack
        stack.enter_context(recorded_launches(self))
        stack.enter_context(_Recorder(self, graph))

    def end_capture(self) -> RecordedGraph:
        assert self._current is not None
        (graph, stack), self._current = self._current, None
        stack.close()
        graph.family.spoil()
        self.graphs.append(graph)
        return graph

    def abandon(self) -> None:
        if self._current is not None:
            (_, stack), self._current = self._current, None
            stack.close()

    def make_room(self) -> None:
        assert self._current is None, "not during a capture"
        self.num_rooms += 1
        self._left, self._room = self._room, 0

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_contiguous()
        return tensor

    def launch(self, kernel: Any, grid: Grid, args: Sequence[Any], constants: Mapping[str, Any]) -> None:
        assert self._current is not None
        if not all(grid):
            raise CaptureError(f"{kernel.__name__} is captured with the empty grid {grid}, and will never run")
        graph = self._current[0]
        for each in args:
            if isinstance(each, torch.Tensor):
                self.continues(graph, each)
        graph.entries.append(_Launch(kernel, grid, args, constants))

    def continues(self, graph: RecordedGraph, tensor: torch.Tensor) -> None:
        """Note that `graph` uses `tensor`, which an earlier graph may own."""
        address = tensor.untyped_storage().data_ptr()
        for family in self._families:
            if family is not graph.family and address in family.owned:
                graph.family.owned |= family.owned
                graph.family.tensors += family.tensors
                self._families.remove(family)
                for other in self.graphs:
                    if other.family is family:
                        other.family = graph.family
                return

    def before_replay(self, family: _Family) -> None:
        for other in self._families:
            if other is not family:
                other.spoil()


class _Recorder(TorchDispatchMode):
    def __init__(self, capture: RecordingCapture, graph: RecordedGraph) -> None:
        super().__init__()
        self._capture = capture
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
        selects = name == "index" and any(each.dtype == torch.bool for each in tensors[1:])
        if name.startswith(FORBIDDEN) or selects:
            raise CaptureError(f"{name} during a capture")
        for tensor in tensors:
            self._capture.continues(self._graph, tensor)
        family = self._graph.family
        if func._schema.is_mutable:
            written = _written(func, args, kwargs)
            self._graph.entries.append(_Operation(func, args, kwargs, []))
            if any(each.untyped_storage().data_ptr() not in family.owned for each in written):
                return written[0] if len(written) == 1 else tuple(written)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        fresh = []
        for index, each in enumerate(tree_flatten(result)[0]):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in known:
                fresh.append((index, each))
                family.owned[each.untyped_storage().data_ptr()] = each.untyped_storage()
                family.tensors.append(each)
        if fresh:
            self._graph.entries.append(_Operation(func, args, kwargs, fresh))
        return result


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator writes to, by its schema."""
    values = {**dict(zip((each.name for each in func._schema.arguments), args, strict=False)), **kwargs}
    return [
        values[each.name]
        for each in func._schema.arguments
        if each.alias_info is not None and each.alias_info.is_write and values.get(each.name) is not None
    ]


def spoil(tensor: torch.Tensor) -> None:
    """Fill with garbage."""
    if tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(GARBAGE[tensor.dtype.is_floating_point])
