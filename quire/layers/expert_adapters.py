"""Low-rank adapters of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import torch

from quire.kernels.matmul import row_linear
from quire.layers.adapters import (
    PANEL,
    AdapterPlace,
    Adapters,
    AdapterStack,
    AdapterStorage,
    LowRank,
    Part,
    StepSlots,
    rows_by_slot,
)
from quire.parallel.expert_placement import ELSEWHERE
from quire.parallel.interface import ProcessGroup

if TYPE_CHECKING:
    from quire.kernels.triton.experts import ExpertAdapterMatrices

Stacked = Literal["gate_up_proj", "down_proj"]
STACKED: tuple[Stacked, ...] = ("gate_up_proj", "down_proj")
"""Parameters with all experts, in Transformers' order."""


class ExpertStack(AdapterStack):
    """AdapterStack, on a CPU a product each part."""

    __slots__ = ()

    def columns(self, number: int) -> tuple[int, int]:
        return 0, PANEL


class ExpertAdapters:
    """Adapters of one mixture. gate_up: pieces 2 i and 2 i + 1 are place i's."""

    def __init__(
        self, adapters: Adapters, count: int, size: int, intermediate: Part, held: int, places: torch.Tensor | None
    ) -> None:
        """intermediate: an expert's inner width. held: experts here. places: see ExpertWeights."""
        self._adapters = adapters
        self.count, self.held, self._places = count, held, places
        self.gate_up = ExpertStack(size, 0, size, [intermediate] * (2 * held), _alone(2 * held), groups=held)
        down = [Part(size, 0, size)] * held
        self.down = ExpertStack(
            intermediate.local, intermediate.start, intermediate.whole, down, _alone(held), groups=held
        )
        for stack in (self.gate_up, self.down):
            adapters.add_layer(stack, bool)

    def slots_of(self, x: torch.Tensor) -> torch.Tensor | None:
        step = self._adapters.step
        return step.of(x) if isinstance(step, StepSlots) else None

    def add_to_products(
        self, matrix: Stacked, expert: int, x: torch.Tensor, y: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """y, overwritten, plus an expert's adapters. slots: the rows'."""
        stack, parts = (self.down, 1) if matrix == "down_proj" else (self.gate_up, 2)
        for rows, found in rows_by_slot(stack, slots):
            for part in range(parts):
                own = found.get(parts * expert + part)
                if own is not None:
                    inner = row_linear(x[rows].to(own.a.dtype), own.a, None) * own.scale
                    width = len(own.b[0])
                    y[rows, part * width : (part + 1) * width] += row_linear(inner, own.b[0], None).to(y.dtype)
        return y

    def on_device(self, x: torch.Tensor) -> ExpertAdapterMatrices | None:
        """Matrices for x on a GPU, if any."""
        step = self._adapters.step
        wide, down = (None if each.stored is None else each.stored.matrices for each in (self.gate_up, self.down))
        if step is None or wide is down is None:
            return None
        from quire.kernels.triton.experts import ExpertAdapterMatrices  # a CPU has no Triton

        return ExpertAdapterMatrices(wide, down, step.slots_of(x), self._adapters.storage.num_slots)

    def recorded(self) -> dict[str, Any]:
        step = self._adapters.step
        if step is None:
            return {}
        step.recorder.keep.append(self)
        wide, down = self.gate_up.stored.table, self.down.stored.table
        return {"wide_adapters": wide, "down_adapters": down, "column": step.column}

    def target(self, expert: int, part: int | None) -> AdapterPlace | None:
        """Target until experts move; None: on another rank."""
        place = expert if self._places is None else int(self._places[expert, 0])
        if place == ELSEWHERE:
            return None
        return AdapterPlace(self.down, place) if part is None else AdapterPlace(self.gate_up, 2 * place + part)

    # -- experts that move between ranks ----------------------------------------------------------------------------

    def broadcast(self, group: ProcessGroup, source: int, place: int) -> list[LowRank | None]:
        """Matrices in a place of rank `source`; all ranks call it, between loads."""
        storage = self._adapters.storage
        pieces = list(self._pieces(place if group.rank == source else 0))
        own = [storage.read(stack, slot, piece) for slot, stack, piece in pieces]
        told = [(0.0, 0.0) if each is None else (float(len(each.a)), each.scale) for each in own]
        told = group.broadcast(torch.tensor(told, dtype=torch.float64), source).tolist()
        shapes = [
            [(int(rank), stack.in_features), (stack.parts[piece].local, int(rank))]
            for (rank, _), (_, stack, piece) in zip(told, pieces, strict=True)
        ]
        sizes = [prod(shape) for pair in shapes for shape in pair]
        if not sum(sizes):
            return [None] * len(pieces)
        data = torch.zeros(sum(sizes), dtype=storage.dtype)
        if group.rank == source:
            data = torch.cat([part.flatten() for each in own if each is not None for part in (each.a, *each.b)])
        parts = iter(group.broadcast(data.view(torch.uint8), source).view(storage.dtype).split(sizes))
        pairs = [[next(parts).view(shape) for shape in pair] for pair in shapes]
        return [LowRank(a, [b], scale) if len(a) else None for (a, b), (_, scale) in zip(pairs, told, strict=True)]

    def replace(self, place: int, matrices: Sequence[LowRank | None]) -> None:
        """Put those of `broadcast` in a place."""
        storage = self._adapters.storage
        for (slot, stack, piece), own in zip(self._pieces(place), matrices, strict=True):
            if own is None:
                storage.clear(stack, slot, piece)
            else:
                storage.load(stack, slot, piece, own)

    def _pieces(self, place: int) -> Iterator[tuple[int, AdapterStack, int]]:
        for slot in range(1, self._adapters.storage.num_slots + 1):
            yield slot, self.gate_up, 2 * place
            yield slot, self.gate_up, 2 * place + 1
            yield slot, self.down, place


def _alone(count: int) -> list[range]:
    return [range(i, i + 1) for i in range(count)]


class ExpertPlace(AdapterPlace):
    """AdapterPlace of one expert's matrix, if here."""

    def __init__(self, mixture: ExpertAdapters, expert: int, part: int | None) -> None:
        """part: gate (0), up (1) or down (None)."""
        super().__init__(mixture.down if part is None else mixture.gate_up, 0)
        self.mixture, self.expert, self.part = mixture, expert, part

    def load(self, storage: AdapterStorage, slot: int, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        target = self.mixture.target(self.expert, self.part)
        if target is not None:
            target.load(storage, slot, a, b, scale)


class StackedPlace(AdapterPlace):
    """Target of PEFT's stacked A, [experts * rank, inputs], and B, [outputs, rank * experts]."""

    def __init__(self, mixture: ExpertAdapters, matrix: Stacked, *, alternates: bool, turned: bool = False) -> None:
        """alternates: rows of gate and up alternate. turned: see `fitting`."""
        self.mixture, self._matrix, self._alternates, self._turned = mixture, matrix, alternates, turned

    def fitting(self, a: torch.Tensor, rank: int) -> StackedPlace:
        """Target for this A: PEFT may take inputs for outputs (Llama 4)."""
        outputs, inputs = self.shape
        turned = inputs != outputs and tuple(a.shape) == (rank * self.mixture.count, outputs)
        return StackedPlace(self.mixture, self._matrix, alternates=self._alternates, turned=turned)

    @property
    def stacks(self) -> Sequence[AdapterStack]:
        return (self.mixture.down if self._matrix == "down_proj" else self.mixture.gate_up,)

    @property
    def shape(self) -> tuple[int, int]:
        stack = self.mixture.down if self._matrix == "down_proj" else self.mixture.gate_up
        return len(self._parts) * stack.parts[0].whole, stack.in_whole

    @property
    def local_elements(self) -> int:
        own = [ExpertPlace(self.mixture, 0, part).local_elements for part in self._parts]
        return self.mixture.held * sum(own)

    def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        (outputs, inputs), count = self.shape[:: -1 if self._turned else 1], self.mixture.count
        return (rank * count, inputs), (outputs, rank * count)

    @property
    def _parts(self) -> tuple[int | None, ...]:
        return (None,) if self._matrix == "down_proj" else (0, 1)

    def covered(self) -> list[object]:
        return [(self.mixture, expert, part) for expert in range(self.mixture.count) for part in self._parts]

    def load(self, storage: AdapterStorage, slot: int, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        count = self.mixture.count
        by_expert = a.unflatten(0, (count, -1)), b.unflatten(1, (-1, count)).permute(2, 0, 1)
        for expert, (own_a, own_b) in enumerate(zip(*by_expert, strict=True)):
            if self._turned:
                own_a, own_b = own_b.t(), own_a.t()
            half = len(own_b) // len(self._parts)
            for part in self._parts:
                rows = own_b
                if part is not None:
                    rows = own_b[part::2] if self._alternates else own_b[part * half : (part + 1) * half]
                ExpertPlace(self.mixture, expert, part).load(storage, slot, own_a, rows, scale)
