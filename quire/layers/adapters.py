"""Adapters of low rank on linear layers: y = x W^T + scale * (x A^T) B^T, with the A and B of the token's slot.

A model has a number of slots, from 1 on; 0 stands for no adapter. Which slot a token has is a step column of its
request (ADAPTER_SLOTS). What is in a slot changes between steps, and no step has to be recorded or captured again
for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from quire.kernels.matmul import row_linear
from quire.kernels.value import Indices, ReadRows

PANEL = 16
"""Columns of gate and up that take turns where a product is interleaved."""


@dataclass(frozen=True, slots=True)
class Part:
    """Outputs of a linear layer that come from one matrix of a checkpoint. whole: rows of that matrix; start, local:
    this rank's share of them."""

    whole: int
    start: int
    local: int


@dataclass(eq=False, slots=True)
class AdapterStack:
    """The adapters of one linear layer, by slot.

    in_features, in_start: this rank's inputs. in_whole: of all ranks. parts: of its outputs. pieces: the parts that one
    A and B of an adapter serve together, by the matrices that the checkpoint has. is_interleaved: gate and up take
    turns of PANEL columns in the product; known when the layer's weights are loaded.
    """

    in_features: int
    in_start: int
    in_whole: int
    parts: Sequence[Part]
    pieces: list[range] = field(default_factory=list)
    is_interleaved: bool = False
    stored: Any = None
    """What the storage keeps."""

    def columns(self, number: int) -> tuple[int, int]:
        """Of a part in the product: the first column, and how far panels of PANEL columns lie from one another."""
        if self.is_interleaved:
            return PANEL * number, 2 * PANEL
        return sum(part.local for part in self.parts[:number]), PANEL

    def share(self, piece: int, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """This rank's share of A [rank, in_whole] and of B [rows, rank], which is cut into the piece's parts."""
        shares, start = [], 0
        for number in self.pieces[piece]:
            part = self.parts[number]
            shares.append(b.narrow(0, start + part.start, part.local))
            start += part.whole
        return a.narrow(1, self.in_start, self.in_features), shares


class AdapterStorage(Protocol):
    """How the matrices of adapters are kept, for one kind of kernels."""

    num_slots: int
    max_rank: int

    def attach(self, stack: AdapterStack) -> None:
        """Have room for a layer's adapters, once its weights are loaded."""
        ...

    def load(self, stack: AdapterStack, slot: int, piece: int, matrices: LowRank) -> None:
        """Keep an adapter's matrices. No step that runs has rows of the slot."""
        ...

    def clear(self, stack: AdapterStack, slot: int) -> None:
        """Drop what the slot has."""
        ...


@dataclass(frozen=True, slots=True)
class LowRank:
    """a: [rank, inputs]; b: of each part [outputs, rank]; both this rank's share, of any floating dtype."""

    a: torch.Tensor
    b: Sequence[torch.Tensor]
    scale: float


class TorchAdapterStorage:
    """Matrices as tensors, for plain torch operators."""

    def __init__(self, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_slots, self.max_rank = num_slots, max_rank
        self._dtype, self._device = dtype, device

    def attach(self, stack: AdapterStack) -> None:
        stack.stored = {}

    def load(self, stack: AdapterStack, slot: int, piece: int, matrices: LowRank) -> None:
        a, *b = (each.to(self._device, self._dtype) for each in (matrices.a, *matrices.b))
        kept = LowRank(a, b, matrices.scale)
        stack.stored.setdefault(slot, {})[piece] = kept

    def clear(self, stack: AdapterStack, slot: int) -> None:
        stack.stored.pop(slot, None)


class StepSlots:
    """The slots of a step's tokens. all: [T]; read: [R], of the tokens that are read."""

    def __init__(self, slots: Any, rows: Any) -> None:
        self.all = slots
        self.read = slots if rows is None else slots[rows]

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Of the rows of x, which are all of the step's or those that are read: of equal numbers both are the same."""
        found: torch.Tensor = self.all if len(x) == len(self.all) else self.read
        return found


class Adapters:
    """The adapters of one model: its layers', and the slots of the step that runs."""

    def __init__(self, storage: AdapterStorage) -> None:
        self.storage = storage
        self.stacks: list[tuple[AdapterStack, Callable[[], bool]]] = []
        self._step: Any = None

    def add_layer(self, stack: AdapterStack, is_interleaved: Callable[[], bool]) -> None:
        """Note a layer. is_interleaved: of its product, once its weights are loaded."""
        self.stacks.append((stack, is_interleaved))

    def weights_are_loaded(self) -> None:
        """Learn how the layers' products lie, before anything is recorded or any adapter loaded."""
        for stack, is_interleaved in self.stacks:
            stack.is_interleaved = is_interleaved()
            self.storage.attach(stack)

    def begin(self, slots: Indices | None, rows: ReadRows | None) -> None:
        """Begin a pass. slots: of its tokens, [T] (None: no token has an adapter, and the pass computes nothing more
        than that of a model without). rows: the tokens that are read."""
        if not isinstance(slots, torch.Tensor):
            self._step = slots
        else:
            self._step = StepSlots(slots, rows) if bool(slots.any()) else None

    @property
    def step(self) -> Any:
        """The slots of the pass, as `Operations.add_adapted` takes them; None: no token has an adapter."""
        return self._step


def add_adapted(stack: AdapterStack, x: torch.Tensor, y: torch.Tensor, slots: StepSlots) -> torch.Tensor:
    """`Operations.add_adapted` in torch, slot by slot. A row's result depends on that row alone."""
    stored = stack.stored or {}
    of_rows = slots.of(x)
    for slot in of_rows.unique().tolist():
        found = stored.get(slot)
        if not found:
            continue
        rows = (of_rows == slot).nonzero().flatten()
        own = x.index_select(0, rows)
        for piece, matrices in found.items():
            inner = row_linear(own.to(matrices.a.dtype), matrices.a, None) * matrices.scale
            for number, b in zip(stack.pieces[piece], matrices.b, strict=True):
                first, step = stack.columns(number)
                assert step == PANEL, "torch's products are not interleaved"
                y[rows, first : first + len(b)] += row_linear(inner, b, None).to(y.dtype)
    return y


class AdapterPlace:
    """Where the A and B of one of a checkpoint's matrices go."""

    def __init__(self, stack: AdapterStack, piece: int, order: torch.Tensor | None = None) -> None:
        """order: of the checkpoint's rows, as the layer has them; None: the layer's own."""
        self.stack, self.piece, self._order = stack, piece, order

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs) of the whole matrix."""
        parts = self.stack.pieces[self.piece]
        return sum(self.stack.parts[part].whole for part in parts), self.stack.in_whole

    @property
    def local_elements(self) -> int:
        """Elements of A and B for each rank of an adapter, of this rank's share."""
        parts = self.stack.pieces[self.piece]
        return self.stack.in_features + sum(self.stack.parts[part].local for part in parts)

    def ordered(self, order: torch.Tensor) -> AdapterPlace:
        """The same for a checkpoint whose rows `order` brings to the layer's."""
        return AdapterPlace(self.stack, self.piece, order)

    def load(self, storage: AdapterStorage, slot: int, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        """Keep an adapter's matrices, A [rank, inputs] and B [outputs, rank], of any floating dtype, in a slot."""
        own_a, own_b = self.stack.share(self.piece, a, b if self._order is None else b[self._order])
        storage.load(self.stack, slot, self.piece, LowRank(own_a, own_b, scale))


def padded(tensor: torch.Tensor, dim: int, multiple: int) -> torch.Tensor:
    """The tensor with zeros behind its end in one dimension, up to a multiple."""
    missing = -tensor.shape[dim] % multiple
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1 - dim) + (0, missing)) if missing else tensor
