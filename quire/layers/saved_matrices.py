"""Heads that adapters may bring whole, in torch."""

from __future__ import annotations

import torch

from quire.kernels.matmul import row_linear
from quire.layers.adapters import Adapters, SlotMatrices, StepSlots


class SavedMatrices(SlotMatrices[tuple[torch.Tensor, torch.Tensor | None]]):
    """Matrices and biases in place of a head's, float32, by slot."""

    def __init__(self, adapters: Adapters, shape: tuple[int, int], *, has_bias: bool) -> None:
        super().__init__(adapters)
        self.shape, self.has_bias = shape, has_bias

    def load(self, slot: int, matrices: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        weight, bias = matrices
        super().load(slot, (weight.float(), None if bias is None else bias.float()))

    def add(self, x: torch.Tensor, y: torch.Tensor, slots: StepSlots) -> torch.Tensor:
        """y, overwritten where rows have matrices. x: [R, inputs]."""
        for rows, (weight, bias) in self._by_slot(x, slots):
            y[rows] = row_linear(x[rows].to(weight.dtype), weight, bias).to(y.dtype)
        return y

    def add_recorded(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert self._adapters.running_head is not None, "a run brings its slots"
        return self.add(x, y, self._adapters.running_head)
