"""Attention whose result a gate of the input lets through, head by head and element by element (Qwen3-Next)."""

from __future__ import annotations

import torch

from quire.attention.interface import LayerAttention, PlannedStep
from quire.kernels.value import ReadRows, Value
from quire.layers.attention import Attention
from quire.layers.context import LayerContext, WeightSlots
from quire.layers.interleaved import shared_slot
from quire.layers.linear import ColumnParallelLinear
from quire.layers.norm import UnitOffsetRMSNorm
from quire.layers.operations import RotationTable


class GatedAttention(Attention):
    """As Attention, with the result times sigmoid(gate(x)), and head norms that multiply by 1 + weight. In a checkpoint
    the query matrix holds the gate as well: of each head its query rows, then its gate rows."""

    def __init__(
        self, hidden_size: int, shape: LayerAttention, *, bias: bool, norm_epsilon: float, context: LayerContext
    ) -> None:
        super().__init__(
            hidden_size,
            shape,
            qkv_bias=bias,
            output_bias=bias,
            context=context,
            norm_epsilon=norm_epsilon,
            norm=UnitOffsetRMSNorm,
        )
        self._gate = ColumnParallelLinear(hidden_size, (shape.num_heads * shape.head_dim,), bias=bias, context=context)
        rows = torch.arange(2 * shape.num_heads * shape.head_dim).view(shape.num_heads, 2, shape.head_dim)
        self._orders = rows[:, 0].flatten(), rows[:, 1].flatten()

    def __call__(
        self,
        x: Value,
        residual: Value | None,
        rotation: RotationTable | None,
        step: PlannedStep,
        rows: ReadRows | None = None,
    ) -> Value:
        attended = self._operations.attend(self._heads, self._project(x), rotation, step)
        if rows is not None:
            attended, x = (self._operations.gather_rows(each, rows) for each in (attended, x))
            residual = None if residual is None else self._operations.gather_rows(residual, rows)
        return self._output(self._operations.gate(attended, self._gate(x)), residual)

    def slots(self, qkv: tuple[str, ...], output: str, *, transposed: bool = False) -> WeightSlots:
        slots, gates = super().slots(qkv, output, transposed=transposed), self._gate.slots((qkv[0],))
        return slots | {name: shared_slot((slots[name], gate), self._orders) for name, gate in gates.items()}
