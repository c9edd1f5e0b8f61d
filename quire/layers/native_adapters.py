"""Adapters for native kernels, found through a table that recorded programs keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from quire.kernels.cpu import _native
from quire.kernels.cpu.recorder import Buffer, RecordedIndices
from quire.layers.adapters import AdapterStack, LowRank, StepSlots, nothing_runs, padded

TYPES = {
    torch.float32: _native.WeightType.F32,
    torch.bfloat16: _native.WeightType.BF16,
    torch.float16: _native.WeightType.F16,
}
ALIGNMENT: int = _native.ADAPTER_ALIGNMENT
RANKS: int = _native.ADAPTER_RANKS


class PackedMatrices(NamedTuple):
    a: torch.Tensor
    b: list[torch.Tensor]
    rank: int
    scale: float


@dataclass(slots=True)
class NativeStack:
    """One layer's adapters as native kernels read them. kept: by slot and piece."""

    table: _native.AdapterTable
    kept: dict[int, dict[int, PackedMatrices]] = field(default_factory=dict)


class NativeAdapterStorage:
    """AdapterStorage for native kernels. A: blocks of RANKS rows, [block, panel of ALIGNMENT inputs, RANKS, ALIGNMENT];
    B: panels of ALIGNMENT outputs, [panel, rank, ALIGNMENT]; zero-padded."""

    def __init__(self, num_slots: int, max_rank: int, dtype: torch.dtype) -> None:
        self.num_slots, self.max_rank, self.dtype, self.adds_in_torch = num_slots, max_rank, dtype, True

    def attach(self, stack: AdapterStack) -> None:
        segments = []
        for number, piece in enumerate(stack.pieces):
            for part in piece:
                segments.append((number, *stack.columns(part), stack.parts[part].local))
        sizes = (self.num_slots, stack.in_features, self.max_rank, max(1, len(stack.pieces)))
        stack.stored = NativeStack(_native.AdapterTable(TYPES[self.dtype], *sizes, segments))

    def load(self, stack: AdapterStack, slot: int, piece: int, matrices: LowRank) -> None:
        rank = len(matrices.a)
        a = padded(padded(matrices.a.to(self.dtype), 1, ALIGNMENT), 0, RANKS).unflatten(1, (-1, ALIGNMENT))
        a = a.unflatten(0, (-1, RANKS)).transpose(1, 2).contiguous()
        panels = [padded(b.to(self.dtype), 0, ALIGNMENT).unflatten(0, (-1, ALIGNMENT)) for b in matrices.b]
        b = [each.transpose(1, 2).contiguous() for each in panels]
        own = stack.stored
        own.table.set(slot, piece, a.data_ptr(), rank, matrices.scale, [each.data_ptr() for each in b])
        own.kept.setdefault(slot, {})[piece] = PackedMatrices(a, b, rank, matrices.scale)

    def clear(self, stack: AdapterStack, slot: int, piece: int | None = None) -> None:
        own: NativeStack = stack.stored
        if piece is None:
            own.table.clear(slot)
            own.kept.pop(slot, None)
        elif own.kept.get(slot, {}).pop(piece, None) is not None:
            own.table.set(slot, piece, 0, 1, 0.0, [0] * len(stack.pieces[piece]))

    def read(self, stack: AdapterStack, slot: int, piece: int) -> LowRank | None:
        own: NativeStack = stack.stored
        found = own.kept.get(slot, {}).get(piece)
        if found is None:
            return None
        a = found.a.transpose(1, 2).flatten(2).flatten(0, 1)[: found.rank, : stack.in_features]
        parts = [stack.parts[number] for number in stack.pieces[piece]]
        rows = [each.transpose(1, 2).flatten(0, 1)[: part.local] for each, part in zip(found.b, parts, strict=True)]
        return LowRank(a, rows, found.scale)

    def step(self, slots: torch.Tensor, rows: torch.Tensor | None) -> StepSlots | None:
        raise AssertionError("native programs are recorded, and run without layers")

    def steps_so_far(self) -> Callable[[], None]:
        return nothing_runs


def record_adapted(stack: AdapterStack, x: Buffer, y: Buffer, slots: RecordedIndices) -> Buffer:
    """`Operations.add_adapted` over placeholders."""
    if not stack.pieces:
        return y  # no checkpoint matrix belongs to the layer
    own: NativeStack = stack.stored
    x.recorder.keep.append(own)
    width = len(stack.pieces) * own.table.max_rank
    inner = x.recorder.call("adapter_shrink", width, buffers={"x": x}, table=own.table, column=slots.column)
    return x.recorder.call(
        "adapter_expand",
        y.width,
        over=y,
        in_place=True,
        buffers={"inner": inner},
        table=own.table,
        column=slots.column,
        first_segment=0,
        num_segments=sum(len(piece) for piece in stack.pieces),
    )
