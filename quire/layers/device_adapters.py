"""Adapters for Triton kernels: matrices of all slots in memory of the device that never moves, for CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from quire.kernels.triton.adapters import AdapterMatrices, SlotTiles, add_adapted, add_looked_up
from quire.layers.adapters import AdapterStack, LowRank


class Event(Protocol):
    """Point in a stream of the device, which other streams or the host wait for."""

    def synchronize(self) -> None:
        """Wait on the host until the stream passes it."""
        ...


class LoadStreams(Protocol):
    """Streams of the device on which adapters are copied beside steps."""

    @property
    def device(self) -> torch.device: ...

    def loading(self) -> AbstractContextManager[object]:
        """Context for copies beside steps, in any thread."""
        ...

    def record(self) -> Event:
        """Current point in the calling context's stream, to wait for."""
        ...


@dataclass(eq=False, slots=True)
class DeviceMatrices:
    """Adapters of a layer. starts: by piece, in a slot of `matrices.b`."""

    matrices: AdapterMatrices
    starts: list[int]


class DeviceAdapterStorage:
    """AdapterStorage for Triton kernels. Loading copies on a stream of its own and waits there."""

    def __init__(self, num_slots: int, max_rank: int, dtype: torch.dtype, streams: LoadStreams) -> None:
        self.num_slots, self.max_rank = num_slots, max_rank
        self.dtype, self._streams, self.adds_in_torch = dtype, streams, False

    def attach(self, stack: AdapterStack) -> None:
        if not stack.pieces or not stack.is_allowed:
            return
        assert not stack.is_interleaved, "products on a device are not interleaved"
        pieces = []
        for piece in stack.pieces[: len(stack.pieces) // stack.groups]:
            first = sum(part.local for part in stack.parts[: piece.start])
            pieces.append((first, sum(stack.parts[part].local for part in piece)))
        sizes = (self.num_slots * stack.groups, self.max_rank, stack.in_features)
        matrices = AdapterMatrices.empty(*sizes, pieces, self.dtype, self._streams.device)
        stack.stored = DeviceMatrices(matrices, [place[2] for place in matrices.places.tolist()])

    def load(self, stack: AdapterStack, slot: int, piece: int, matrices: LowRank) -> None:
        own: DeviceMatrices = stack.stored
        a = matrices.a.to(self.dtype).contiguous()
        b = torch.cat([each.to(self.dtype) for each in matrices.b]).t().contiguous()
        with torch.inference_mode(), self._streams.loading():
            group, own_piece = divmod(piece, len(own.starts))
            place = (slot - 1) * stack.groups + group + 1
            own.matrices.store(place, own_piece, own.starts[own_piece], a, b, matrices.scale)
            self._streams.record().synchronize()

    def clear(self, stack: AdapterStack, slot: int, piece: int | None = None) -> None:
        assert piece is None, "experts stay on a device"
        if stack.stored is not None:
            with torch.inference_mode(), self._streams.loading():
                stack.stored.matrices.clear((slot - 1) * stack.groups + 1, stack.groups)
                self._streams.record().synchronize()

    def read(self, stack: AdapterStack, slot: int, piece: int) -> LowRank | None:
        raise AssertionError("experts stay on a device")

    def step(self, slots: torch.Tensor, rows: torch.Tensor | None) -> DeviceSlots:
        return DeviceSlots(slots, rows, self.num_slots)

    def steps_so_far(self) -> Callable[[], None]:
        return self._streams.record().synchronize


class DeviceSlots:
    """Adapter slots of a step's tokens, sorted for their first layer."""

    def __init__(self, slots: torch.Tensor, rows: torch.Tensor | None, num_slots: int) -> None:
        self._slots, self._rows, self._num_slots = slots, rows, num_slots

    @cached_property
    def _all(self) -> SlotTiles:
        return SlotTiles.of(self._slots, self._num_slots)

    @cached_property
    def _read(self) -> SlotTiles:
        return self._all if self._rows is None else SlotTiles.of(self._slots[self._rows], self._num_slots)

    def of(self, x: torch.Tensor) -> SlotTiles:
        return self._all if len(x) == len(self._slots) else self._read

    def slots_of(self, x: torch.Tensor) -> torch.Tensor:
        return self._slots if self._rows is None or len(x) == len(self._slots) else self._slots[self._rows]


def add_on_device(stack: AdapterStack, x: torch.Tensor, y: torch.Tensor, slots: DeviceSlots) -> torch.Tensor:
    """`Operations.add_adapted` with Triton kernels."""
    if stack.stored is not None:
        add_adapted(stack.stored.matrices, x, y, slots.of(x))
    return y


def look_up_on_device(stack: AdapterStack, indices: torch.Tensor, y: torch.Tensor, slots: DeviceSlots) -> torch.Tensor:
    if stack.stored is not None:
        add_looked_up(stack.stored.matrices, indices, y, slots.of(y))
    return y
