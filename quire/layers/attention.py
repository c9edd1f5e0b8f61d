"""The attention block: projections around one call of the attention back end."""

from __future__ import annotations

import torch

from quire.attention.interface import AttentionStep, LayerAttention
from quire.layers.context import LayerContext, WeightSlots, prefixed
from quire.layers.linear import ColumnLinear, RowLinear
from quire.layers.norm import RMSNorm
from quire.layers.rotary import Rotation


class Attention:
    """Grouped-query self-attention. query, key and value are one matrix; heads are shared out over the ranks.

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
        self._shape = LayerAttention(
            layer=shape.layer,
            num_heads=shape.num_heads // ranks,
            num_kv_heads=shape.num_kv_heads // ranks,
            head_dim=dim,
            scale=shape.scale,
            window=shape.window,
            soft_cap=shape.soft_cap,
        )
        query, key = shape.num_heads * dim, shape.num_kv_heads * dim
        self._qkv = ColumnLinear(hidden_size, (query, key, key), bias=qkv_bias, context=context)
        self._output = RowLinear(query, hidden_size, bias=output_bias, context=context)
        self._norms = (
            None if norm_epsilon is None else (RMSNorm(dim, norm_epsilon, context), RMSNorm(dim, norm_epsilon, context))
        )

    def __call__(self, x: torch.Tensor, rotation: Rotation | None, step: AttentionStep) -> torch.Tensor:
        """x: [T, hidden_size] -> [T, hidden_size]. rotation: of the tokens' positions (None: none is applied)."""
        shape = self._shape
        heads = self._qkv(x).view(x.shape[0], shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        turned, value = heads.split((shape.num_heads + shape.num_kv_heads, shape.num_kv_heads), dim=1)
        if self._norms is not None:
            query, key = turned.split((shape.num_heads, shape.num_kv_heads), dim=1)
            turned = torch.cat((self._norms[0](query), self._norms[1](key)), dim=1)
        if rotation is not None:
            turned = rotation.apply(turned)
        query, key = turned.split((shape.num_heads, shape.num_kv_heads), dim=1)
        return self._output(step.run(shape, query, key, value).flatten(1))

    def slots(self, qkv: tuple[str, ...], output: str, *, transposed: bool = False) -> WeightSlots:
        """qkv: the checkpoint's names of the projections (one, when it keeps them in one tensor); output: of the
        output projection; transposed: it keeps matrices as [in, out]. Head norms are q_norm and k_norm."""
        slots = {
            **self._qkv.slots(qkv, transposed=transposed),
            **self._output.slots(output, transposed=transposed),
        }
        if self._norms is not None:
            slots |= prefixed("q_norm", self._norms[0].slots()) | prefixed("k_norm", self._norms[1].slots())
        return slots
