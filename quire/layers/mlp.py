"""Feed-forward blocks."""

from __future__ import annotations

from quire.kernels.value import Value
from quire.layers.context import LayerContext, WeightSlots
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear


class GatedMLP:
    """x -> residual + down(activation(gate(x)) * up(x)), with gate and up fused. Tensors gate_proj, up_proj, down_proj.
    activation: name in `kernels/activation.py`."""

    def __init__(self, size: int, intermediate: int, activation: str, *, bias: bool, context: LayerContext) -> None:
        self._gate_up = ColumnParallelLinear(
            size, (intermediate, intermediate), bias=bias, context=context, activation=activation, gated=True
        )
        self._down = RowParallelLinear(intermediate, size, bias=bias, context=context)

    def __call__(self, x: Value, residual: Value | None) -> Value:
        """[T, size] each -> [T, size]; the residual (or None) is overwritten."""
        return self._down(self._gate_up(x), residual)

    def slots(self, *, fused: bool = False) -> WeightSlots:
        """Checkpoint slots of the block. fused: the checkpoint has one tensor gate_up_proj."""
        gate_up = ("gate_up_proj",) if fused else ("gate_proj", "up_proj")
        return {**self._gate_up.slots(gate_up), **self._down.slots("down_proj")}


class MLP:
    """x -> residual + down(activation(up(x))), as in GPT-2, OPT and BERT."""

    def __init__(self, size: int, intermediate: int, activation: str, *, bias: bool, context: LayerContext) -> None:
        self._up = ColumnParallelLinear(size, (intermediate,), bias=bias, context=context, activation=activation)
        self._down = RowParallelLinear(intermediate, size, bias=bias, context=context)

    def __call__(self, x: Value, residual: Value) -> Value:
        """[T, size] each -> [T, size]; the residual is overwritten."""
        return self._down(self._up(x), residual)

    def slots(self, up: str, down: str, *, transposed: bool = False) -> WeightSlots:
        """Checkpoint slots of the block. up, down: checkpoint names; transposed: stored as [in, out]."""
        return {**self._up.slots((up,), transposed=transposed), **self._down.slots(down, transposed=transposed)}
