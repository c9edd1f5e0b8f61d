"""Low-rank adapters of linear layers: y = x W^T + scale * (x A^T) B^T, with A and B of the token's slot: 0, no adapter,
or from 1 on (step column ADAPTER_SLOTS)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F

from quire.kernels.matmul import row_linear
from quire.kernels.value import Indices, ReadRows

MatricesT = TypeVar("MatricesT")
PANEL = 16
"""Columns of gate and up that alternate in an interleaved product."""


@dataclass(frozen=True, slots=True)
class Part:
    """Outputs of a linear layer from one checkpoint matrix. whole: its rows; start, local: first and number of this
    rank's."""

    whole: int
    start: int
    local: int


@dataclass(eq=False, slots=True)
class AdapterStack:
    """Adapters of one linear layer, by slot. in_features, in_start: this rank's inputs. in_whole: inputs over all
    ranks. parts: outputs by checkpoint matrix. pieces: parts that share one A and B. is_interleaved: gate and up
    alternate by PANEL columns in the product; known once weights are loaded. groups: experts."""

    in_features: int
    in_start: int
    in_whole: int
    parts: Sequence[Part]
    pieces: list[range] = field(default_factory=list)
    is_interleaved: bool = False
    groups: int = 1
    is_allowed: bool = True
    stored: Any = None
    """Matrices in the form of the storage's back end."""

    def columns(self, number: int) -> tuple[int, int]:
        """First column of a part in the product, and stride of its panels of PANEL columns."""
        if self.is_interleaved:
            return PANEL * number, 2 * PANEL
        return sum(part.local for part in self.parts[:number]), PANEL

    def share(self, piece: int, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """This rank's share of A, [rank, in_whole], and of B, [rows, rank], split into the piece's parts."""
        shares, start = [], 0
        for number in self.pieces[piece]:
            part = self.parts[number]
            shares.append(b.narrow(0, start + part.start, part.local))
            start += part.whole
        return a.narrow(1, self.in_start, self.in_features), shares


class AdapterStorage(Protocol):
    """Storage of adapter matrices (A, B) for one kind of kernels."""

    num_slots: int
    max_rank: int
    dtype: torch.dtype
    adds_in_torch: bool
    """True if SlotMatrices may add to results."""

    def attach(self, stack: AdapterStack) -> None:
        """Allocate room for a layer's adapters once its weights are loaded."""
        ...

    def load(self, stack: AdapterStack, slot: int, piece: int, matrices: LowRank) -> None:
        """Store an adapter's matrices. No running step may have rows of the slot."""
        ...

    def clear(self, stack: AdapterStack, slot: int, piece: int | None = None) -> None:
        """Remove the matrices of a slot, or a piece's."""
        ...

    def read(self, stack: AdapterStack, slot: int, piece: int) -> LowRank | None:
        """Matrices that `load` stored."""
        ...

    def step(self, slots: torch.Tensor, rows: torch.Tensor | None) -> Any:
        """`Adapters.step` for slots, [T]; None if no token has an adapter. rows: see StepSlots."""
        ...

    def steps_so_far(self) -> Callable[[], None]:
        """Function that waits, in any thread, for steps started so far."""
        ...


@dataclass(frozen=True, slots=True)
class LowRank:
    """Matrices of one adapter for one module, this rank's shares in any floating dtype. a: [rank, inputs]; b: [outputs,
    rank] per part."""

    a: torch.Tensor
    b: Sequence[torch.Tensor]
    scale: float

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + sum(each.nbytes for each in self.b)


class TorchAdapterStorage:
    """AdapterStorage of tensors, for torch operators."""

    def __init__(self, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_slots, self.max_rank = num_slots, max_rank
        self.dtype, self._device, self.adds_in_torch = dtype, device, True

    def attach(self, stack: AdapterStack) -> None:
        stack.stored = {}

    def load(self, stack: AdapterStack, slot: int, piece: int, matrices: LowRank) -> None:
        a, *b = (each.to(self._device, self.dtype) for each in (matrices.a, *matrices.b))
        kept = LowRank(a, b, matrices.scale)
        stack.stored.setdefault(slot, {})[piece] = kept

    def clear(self, stack: AdapterStack, slot: int, piece: int | None = None) -> None:
        if piece is None:
            stack.stored.pop(slot, None)
        else:
            stack.stored.get(slot, {}).pop(piece, None)

    def read(self, stack: AdapterStack, slot: int, piece: int) -> LowRank | None:
        found: LowRank | None = stack.stored.get(slot, {}).get(piece)
        return found

    def step(self, slots: torch.Tensor, rows: torch.Tensor | None) -> StepSlots | None:
        return StepSlots(slots, rows) if bool(slots.any()) else None

    def steps_so_far(self) -> Callable[[], None]:
        return nothing_runs


def nothing_runs() -> None:
    """`AdapterStorage.steps_so_far` on a CPU."""


class StepSlots:
    """Adapter slots of a step's tokens, [T], in torch. rows: read tokens (None: all). token_ids: a recorded run's."""

    def __init__(self, slots: torch.Tensor, rows: torch.Tensor | None, token_ids: torch.Tensor | None = None) -> None:
        self._slots, self._rows, self.token_ids = slots, rows, token_ids

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return self._slots if self._rows is None or len(x) == len(self._slots) else self._slots[self._rows]


class Adapters:
    """Adapters of one model's layers, and (`step`) each token's slot in the pass."""

    def __init__(self, storage: AdapterStorage) -> None:
        self.storage = storage
        self.stacks: list[tuple[AdapterStack, Callable[[], bool]]] = []
        self.in_torch: list[SlotMatrices[Any]] = []
        self.places: dict[str, AdapterPlace | None] = {}
        """Targets that need no weight slot, by checkpoint name: a head may be tied."""
        self.saved: dict[str, SavedHead] = {}
        """By checkpoint name."""
        self.step: Any = None
        """Tokens' slots in the pass; None outside, and if no token has an adapter."""
        self.running: StepSlots | None = None
        """Tokens' slots in a recorded program's run."""
        self.running_head: StepSlots | None = None
        """Slots in a recorded head's run."""

    def add_layer(self, stack: AdapterStack, is_interleaved: Callable[[], bool]) -> None:
        """Register a layer. is_interleaved: gives AdapterStack's once the weights are loaded."""
        self.stacks.append((stack, is_interleaved))

    def weights_are_loaded(self, allowed: Collection[int] | None = None) -> None:
        """Fix layouts, before anything is recorded or loaded. allowed: ids of stacks (None: all)."""
        for stack, is_interleaved in self.stacks:
            stack.is_interleaved, stack.is_allowed = is_interleaved(), allowed is None or id(stack) in allowed
            self.storage.attach(stack)

    @contextmanager
    def over(self, slots: Indices | None, rows: ReadRows | None = None) -> Iterator[None]:
        """Context of a forward pass or head. slots: tokens', [T] (None: no adapter, and no cost). rows: read tokens."""
        if isinstance(slots, torch.Tensor):
            self.step = self.storage.step(slots, cast("torch.Tensor | None", rows))
        else:
            self.step = slots
        try:
            yield
        finally:
            self.step = None


class SavedHead(Protocol):
    """Linear layer that adapters may bring whole (SavedMatrices)."""

    shape: tuple[int, int]
    has_bias: bool

    def load(self, slot: int, matrices: tuple[torch.Tensor, torch.Tensor | None]) -> None: ...


class SlotMatrices(Generic[MatricesT]):
    """Adapters' matrices by slot, whose results torch adds."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self._stored: dict[int, MatricesT] = {}
        adapters.in_torch.append(self)

    def load(self, slot: int, matrices: MatricesT) -> None:
        self._stored = {**self._stored, slot: matrices}  # a step beside the load goes through the old one

    def _by_slot(self, x: torch.Tensor, slots: StepSlots) -> Iterator[tuple[torch.Tensor, MatricesT]]:
        stored = self._stored
        if not stored:
            return
        of_rows = slots.of(x)
        for slot, found in stored.items():
            rows = (of_rows == slot).nonzero().flatten()
            if len(rows):
                yield rows, found

    def clear(self, slot: int) -> None:
        self._stored = {each: found for each, found in self._stored.items() if each != slot}


def rows_by_slot(stack: AdapterStack, slots: torch.Tensor) -> Iterator[tuple[torch.Tensor, dict[int, LowRank]]]:
    """Yield (rows, [N], matrices by piece) of each slot with an adapter. slots: the rows', [T]."""
    stored = stack.stored or {}
    for slot in slots.unique().tolist():
        if found := stored.get(slot):
            yield (slots == slot).nonzero().flatten(), found


def add_adapted(stack: AdapterStack, x: torch.Tensor, y: torch.Tensor, slots: StepSlots) -> torch.Tensor:
    """`Operations.add_adapted` in torch. A row's result depends only on that row."""
    for rows, found in rows_by_slot(stack, slots.of(x)):
        own = x.index_select(0, rows)
        for piece, matrices in found.items():
            inner = row_linear(own.to(matrices.a.dtype), matrices.a, None) * matrices.scale
            for number, b in zip(stack.pieces[piece], matrices.b, strict=True):
                first, step = stack.columns(number)
                assert step == PANEL, "torch's products are not interleaved"
                y[rows, first : first + len(b)] += row_linear(inner, b, None).to(y.dtype)
    return y


class AdapterPlace:
    """Target in the layers for an adapter's A and B of one checkpoint matrix. names: A's and B's in files."""

    names = ("A", "B")

    def __init__(self, stack: AdapterStack, piece: int, order: torch.Tensor | None = None) -> None:
        """order: permutation from the checkpoint's rows to the layer's; None: the same order."""
        self.stack, self.piece, self._order = stack, piece, order

    @property
    def stacks(self) -> Sequence[AdapterStack]:
        return (self.stack,)

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs) of the whole matrix."""
        parts = self.stack.pieces[self.piece]
        return sum(self.stack.parts[part].whole for part in parts), self.stack.in_whole

    def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of the two matrices in files."""
        outputs, inputs = self.shape
        return (rank, inputs), (outputs, rank)

    @property
    def local_elements(self) -> int:
        """Elements of this rank's A and B per unit of adapter rank, for the reserved memory."""
        parts = self.stack.pieces[self.piece]
        return self.stack.in_features + sum(self.stack.parts[part].local for part in parts)

    def ordered(self, order: torch.Tensor) -> AdapterPlace:
        """Same target for a checkpoint with rows permuted by `order`."""
        return AdapterPlace(self.stack, self.piece, order)

    def load(self, storage: AdapterStorage, slot: int, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        """Store A, [rank, inputs], and B, [outputs, rank], any floating dtype, in a slot."""
        own_a, own_b = self.stack.share(self.piece, a, b if self._order is None else b[self._order])
        storage.load(self.stack, slot, self.piece, LowRank(own_a, own_b, scale))


class SplitPlace(AdapterPlace):
    """AdapterPlace of a checkpoint matrix whose rows belong to several layers."""

    def __init__(self, rows: int, places: Sequence[tuple[AdapterPlace, torch.Tensor]]) -> None:
        """rows: number in the matrix. places: each layer's target, and its rows' indices."""
        self._rows, self._places = rows, places

    @property
    def stacks(self) -> Sequence[AdapterStack]:
        return [stack for place, _ in self._places for stack in place.stacks]

    @property
    def shape(self) -> tuple[int, int]:
        return self._rows, self._places[0][0].shape[1]

    @property
    def local_elements(self) -> int:
        return sum(place.local_elements for place, _ in self._places)

    def ordered(self, order: torch.Tensor) -> AdapterPlace:
        return SplitPlace(self._rows, [(place, order[rows]) for place, rows in self._places])

    def load(self, storage: AdapterStorage, slot: int, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        for place, rows in self._places:
            place.load(storage, slot, a, b[rows], scale)


def split_place(rows: int, places: Sequence[AdapterPlace | None], orders: Sequence[torch.Tensor]) -> SplitPlace | None:
    """SplitPlace of a matrix with the rows `orders[i]` in place i; None without adapters."""
    found = [(place, order) for place, order in zip(places, orders, strict=True) if place is not None]
    return SplitPlace(rows, found) if found else None


def padded(tensor: torch.Tensor, dim: int, multiple: int) -> torch.Tensor:
    """Pad one dimension with zeros to a multiple, for native panels."""
    missing = -tensor.shape[dim] % multiple
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1 - dim) + (0, missing)) if missing else tensor
