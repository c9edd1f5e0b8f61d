"""How a linear layer's weights are stored, filled and multiplied: the door for int8, int4 and packed checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from quire.quantization.integer_weight import WeightTensor

Parameters = dict[str, torch.Tensor]
"""What one linear layer keeps, by the suffix that a checkpoint gives it ("weight", "bias", "scales", ...)."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Sizes of this rank's matrix; dtype is that of activations (and of plain weights)."""

    in_features: int
    out_features: int
    bias: bool
    dtype: torch.dtype
    device: torch.device


class LinearMethod(Protocol):
    """One way to keep the weights of a linear layer."""

    def create(self, shape: LinearShape) -> Parameters:
        """Tensors of their final size, not filled yet. Every one of them must be loaded."""
        ...

    def load(self, parameters: Parameters, suffix: str, tensor: WeightTensor, first_row: int, num_rows: int) -> None:
        """Copy a checkpoint's tensor ([num_rows, in_features], or [num_rows] for a bias; any dtype, or an
        IntegerWeight) to the output rows first_row .. first_row + num_rows."""
        ...

    def apply(self, parameters: Parameters, x: torch.Tensor) -> torch.Tensor:
        """x: [T, in_features] -> [T, out_features] in x's dtype. A row's result depends on that row alone."""
        ...
