"""Adapters for native kernels, found through a table that recorded programs keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class NativeStack:
    """One layer's adapters as native kernels read them. kept: by slot, tensors whose addresses the table holds."""

    table: _native.AdapterTable
    kept: dict[int, list[torch.Tensor]] = field(default_factory=dict)


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
        own.kept.setdefault(slot, []).extend((a, *b))
        own.table.set(slot, piece, a.data_ptr(), rank, matrices.scale, [each.data_ptr() for each in b])

    def clear(self, stack: AdapterStack, slot: int) -> None:
        stack.stored.table.clear(slot)
        stack.stored.kept.pop(slot, None)

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
