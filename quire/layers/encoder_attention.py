"""The attention block of encoders: projections around attention in both directions."""

from __future__ import annotations

from collections.abc import Sequence

from quire.attention.interface import PlannedStep
from quire.kernels.value import ReadRows, Value
from quire.layers.context import LayerContext, WeightSlots
from quire.layers.encoder_operations import EncoderHeads
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.layers.operations import RotationTable


class EncoderSelfAttention:
    """query, key and value are one matrix. bias: of both projections."""

    def __init__(self, hidden_size: int, heads: EncoderHeads, *, bias: bool, context: LayerContext) -> None:
        width = heads.num_heads * heads.head_dim
        self._heads = heads
        self._operations = context.operations
        self._qkv = ColumnParallelLinear(hidden_size, (width, width, width), bias=bias, context=context)
        self._output = RowParallelLinear(width, hidden_size, bias=bias, context=context)

    def __call__(
        self,
        x: Value,
        residual: Value,
        rotation: RotationTable | None,
        step: PlannedStep,
        rows: ReadRows | None = None,
    ) -> Value:
        """x, residual: [T, hidden_size] -> [T, hidden_size]; the residual is used up. rotation: of the tokens'
        positions (None: none is applied). step: of the attention back end. rows: [R], the tokens whose results are read
        (None: all); then [R, hidden_size]."""
        attended = self._operations.attend_encoder(self._heads, self._qkv(x), rotation, step)
        if rows is not None:
            attended = self._operations.gather_rows(attended, rows)
            residual = self._operations.gather_rows(residual, rows)
        return self._output(attended, residual)

    def slots(self, qkv: Sequence[str], output: str) -> WeightSlots:
        """qkv: the checkpoint's names of the projections (one, when it keeps them in one tensor)."""
        return {**self._qkv.slots(qkv), **self._output.slots(output)}
