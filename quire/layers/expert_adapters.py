"""Low-rank adapters of experts."""

from __future__ import annotations

from typing import Any, Literal

import torch

from quire.kernels.matmul import row_linear
from quire.layers.adapters import (
    PANEL,
    AdapterPlace,
    Adapters,
    AdapterStack,
    AdapterStorage,
    Part,
    StepSlots,
    rows_by_slot,
)

Stacked = Literal["gate_up_proj", "down_proj"]
STACKED: tuple[Stacked, ...] = ("gate_up_proj", "down_proj")
"""Parameters with all experts, in Transformers' order."""


class ExpertStack(AdapterStack):
    """AdapterStack, a product each part."""

    __slots__ = ()

    def columns(self, number: int) -> tuple[int, int]:
        return 0, PANEL


class ExpertAdapters:
    """Adapters of one mixture. gate_up: pieces 2 i and 2 i + 1 are expert i's."""

    def __init__(self, adapters: Adapters, count: int, size: int, intermediate: Part) -> None:
        """intermediate: an expert's inner width."""
        self._adapters = adapters
        self.count = count
        self.gate_up = ExpertStack(size, 0, size, [intermediate] * (2 * count), _alone(2 * count))
        down = [Part(size, 0, size)] * count
        self.down = ExpertStack(intermediate.local, intermediate.start, intermediate.whole, down, _alone(count))
        for stack in (self.gate_up, self.down):
            adapters.add_layer(stack, bool)

    def slots_of(self, x: torch.Tensor) -> torch.Tensor | None:
        """Slots of the rows of x; None without adapters."""
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

    def recorded(self) -> dict[str, Any]:
        """Arguments of a recorded kernel."""
        step = self._adapters.step
        if step is None:
            return {}
        step.recorder.keep.append(self)
        wide, down = self.gate_up.stored.table, self.down.stored.table
        return {"wide_adapters": wide, "down_adapters": down, "column": step.column}

    def place(self, expert: int, part: int | None) -> ExpertPlace:
        """part: gate (0), up (1) or down (None)."""
        return (
            ExpertPlace(self, self.down, expert) if part is None else ExpertPlace(self, self.gate_up, 2 * expert + part)
        )


def _alone(count: int) -> list[range]:
    return [range(i, i + 1) for i in range(count)]


class ExpertPlace(AdapterPlace):
    """AdapterPlace of one expert's matrix."""

    def __init__(self, mixture: ExpertAdapters, stack: AdapterStack, piece: int) -> None:
        super().__init__(stack, piece)
        self.mixture = mixture


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
    def shape(self) -> tuple[int, int]:
        stack = self.mixture.down if self._matrix == "down_proj" else self.mixture.gate_up
        return len(self._parts) * stack.parts[0].whole, stack.in_whole

    @property
    def local_elements(self) -> int:
        own = [self.mixture.place(0, part).local_elements for part in self._parts]
        return self.mixture.count * sum(own)

    def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        (outputs, inputs), count = self.shape[:: -1 if self._turned else 1], self.mixture.count
        return (rank * count, inputs), (outputs, rank * count)

    @property
    def _parts(self) -> tuple[int | None, ...]:
        return (None,) if self._matrix == "down_proj" else (0, 1)

    def covered(self) -> list[object]:
        """(stack, piece) of each matrix."""
        places = (self.mixture.place(expert, part) for expert in range(self.mixture.count) for part in self._parts)
        return [(place.stack, place.piece) for place in places]

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
                self.mixture.place(expert, part).load(storage, slot, own_a, rows, scale)
