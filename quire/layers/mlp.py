"""Feed-forward blocks."""

from __future__ import annotations

import torch

from quire.layers.activation import Activation
from quire.layers.context import LayerContext, WeightSlots
from quire.layers.linear import ColumnLinear, RowLinear


class GatedMLP:
    """down(activation(gate(x)) * up(x)), gate and up in one matrix. Tensors gate_proj, up_proj, down_proj."""

    def __init__(
        self, size: int, intermediate: int, activation: Activation, *, bias: bool, context: LayerContext
    ) -> None:
        self._activation = activation
        self._gate_up = ColumnLinear(size, (intermediate, intermediate), bias=bias, context=context)
        self._down = RowLinear(intermediate, size, bias=bias, context=context)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, size] -> [T, size]."""
        gate, up = self._gate_up(x).split(self._gate_up.local_parts, dim=-1)
        return self._down(self._activation(gate) * up)

    def slots(self) -> WeightSlots:
        return {**self._gate_up.slots(("gate_proj", "up_proj")), **self._down.slots("down_proj")}


class MLP:
    """down(activation(up(x)))."""

    def __init__(
        self, size: int, intermediate: int, activation: Activation, *, bias: bool, context: LayerContext
    ) -> None:
        self._activation = activation
        self._up = ColumnLinear(size, (intermediate,), bias=bias, context=context)
        self._down = RowLinear(intermediate, size, bias=bias, context=context)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, size] -> [T, size]."""
        return self._down(self._activation(self._up(x)))

    def slots(self, up: str, down: str, *, transposed: bool = False) -> WeightSlots:
        """up, down: the checkpoint's names of the two matrices; transposed: it keeps them as [in, out]."""
        return {**self._up.slots((up,), transposed=transposed), **self._down.slots(down, transposed=transposed)}
