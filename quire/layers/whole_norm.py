"""Attention with norms over the whole query and key of a token (OLMo 2 and 3)."""

from __future__ import annotations

from functools import partial

import torch

from quire.kernels.arguments import LayerAttention
from quire.kernels.value import Value
from quire.layers.attention import Attention
from quire.layers.context import LayerContext, WeightSlot, WeightSlots
from quire.layers.norm import RMSNorm
from quire.quantization.integer_weight import WeightSource, copy_into


class WholeNormAttention(Attention):
    """Attention that normalises queries and keys before splitting them into heads, by the mean over all ranks."""

    def __init__(
        self,
        hidden_size: int,
        shape: LayerAttention,
        *,
        qkv_bias: bool,
        output_bias: bool,
        context: LayerContext,
        norm_epsilon: float,
    ) -> None:
        super().__init__(hidden_size, shape, qkv_bias=qkv_bias, output_bias=output_bias, context=context)
        self._group = context.group
        self._sizes = (shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim)
        self._whole_norms = tuple(RMSNorm(size, norm_epsilon, context) for size in self._qkv.local_parts[:2])

    def slots(self, qkv: tuple[str, ...], output: str, *, transposed: bool = False) -> WeightSlots:
        slots = super().slots(qkv, output, transposed=transposed)
        starts = self._qkv.local_starts[:2]
        for name, norm, size, start in zip(("q_norm", "k_norm"), self._whole_norms, self._sizes, starts, strict=True):
            weight = _weight(norm)
            slots[f"{name}.weight"] = WeightSlot((size,), partial(_load, weight, start), weight.nbytes, 1.0, 0.0)
        return slots

    def _project(self, x: Value) -> Value:
        qkv = super()._project(x)
        if self._group.size > 1:
            return self._operations.norm_shares(self._group, [norm.weights for norm in self._whole_norms], qkv)
        start = 0
        for norm in self._whole_norms:
            qkv = self._operations.norm_columns(norm.weights, qkv, start)
            start += norm.weights.size
        return qkv


def _weight(norm: RMSNorm) -> torch.Tensor:
    assert norm.weights.weight is not None, "these norms have weights"
    return norm.weights.weight


def _load(weight: torch.Tensor, start: int, source: WeightSource) -> None:
    copy_into(weight, source.narrow(0, start, len(weight)))
