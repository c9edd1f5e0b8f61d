"""The attention block: projections around one call of the attention back end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.attention.interface import LayerAttention
from quire.kernels.value import Value
from quire.layers.context import LayerContext, WeightSlots, prefixed
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.layers.norm import RMSNorm
from quire.layers.operations import HeadWeights


class Attention:
    """Grouped-query self-attention. query, key and value are one matrix; heads are shared out over the ranks;
    with fewer key and value heads than ranks, neighbouring ranks hold the same one.

    shape: heads, scale and window of the whole layer. qkv_bias, output_bias: of the projections.
    norm_epsilon: of the norms over each query and key head (None: no such norms).
    """

    def __init__(
        self,
        hidden_size: int,
        shape: LayerAttention,
        *,
        qkv_bias: bool,
        output_bias: bool,
        context: LayerContext,
        norm_epsilon: float | None = None,
    ) -> None:
        ranks, dim = context.group.size, shape.head_dim
        kv_shares = min(ranks, shape.num_kv_heads)
        local = replace(shape, num_heads=shape.num_heads // ranks, num_kv_heads=shape.num_kv_heads // kv_shares)
        query, key = shape.num_heads * dim, shape.num_kv_heads * dim
        self._qkv = ColumnParallelLinear(
            hidden_size,
            (query, key, key),
            bias=qkv_bias,
            context=context,
            num_shares=(ranks, kv_shares, kv_shares),
        )
        self._output = RowParallelLinear(query, hidden_size, bias=output_bias, context=context)
        self._norms = () if norm_epsilon is None else tuple(RMSNorm(dim, norm_epsilon, context) for _ in range(2))
        query_norm, key_norm = (norm.weights for norm in self._norms) if self._norms else (None, None)
        self._heads = HeadWeights(local, query_norm, key_norm)
        self._operations = context.operations

    def __call__(self, x: Value, residual: Value, rotation: Any, step: Any) -> Value:
        """x, residual: [T, hidden_size] -> [T, hidden_size]; the residual is used up. rotation: of the tokens'
        positions (None: none is applied). step: of the attention back end."""
        attended = self._operations.attend(self._heads, self._qkv(x), rotation, step)
        return self._output(attended, residual)

    def slots(self, qkv: tuple[str, ...], output: str, *, transposed: bool = False) -> WeightSlots:
        """qkv: the checkpoint's names of the projections (one, when it keeps them in one tensor); output: of the
        output projection; transposed: it keeps matrices as [in, out]. Head norms are q_norm and k_norm."""
        slots = {
            **self._qkv.slots(qkv, transposed=transposed),
            **self._output.slots(output, transposed=transposed),
        }
        if self._norms:
            slots |= prefixed("q_norm", self._norms[0].slots()) | prefixed("k_norm", self._norms[1].slots())
        return slots
