"""Norms over the last dimension."""

from __future__ import annotations

from functools import partial

import torch

from quire.kernels.arguments import NormWeights
from quire.kernels.value import Value
from quire.layers.context import LayerContext, WeightSlot, WeightSlots
from quire.quantization.integer_weight import WeightSource, copy_into


class RMSNorm:
    """x / rms(x) * weight, with statistics in float32."""

    offset = 0.0
    """Number added to a checkpoint's weights (Gemma: 1)."""

    def __init__(self, size: int, epsilon: float, context: LayerContext) -> None:
        weight = torch.empty(size, dtype=torch.float32 if self.offset else context.dtype, device=context.device)
        self.weights = NormWeights(size, weight, None, epsilon, centred=False)
        self._operations = context.operations

    def __call__(self, x: Value) -> Value:
        """[..., size] -> the same shape and dtype."""
        return self._operations.norm(self.weights, x)

    def slots(self) -> WeightSlots:
        return {"weight": _slot(self.weights.weight, 1.0 - self.offset, self.offset)}


class UnitOffsetRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight), as in Gemma."""

    offset = 1.0


class UnweightedRMSNorm(RMSNorm):
    """x / rms(x)."""

    def __init__(self, size: int, epsilon: float, context: LayerContext) -> None:
        super().__init__(size, epsilon, context)
        assert self.weights.weight is not None, "kernels that norm heads take weights"
        self.weights.weight.fill_(1.0)

    def slots(self) -> WeightSlots:
        return {}


class LayerNorm:
    """(x - mean) / deviation * weight + bias. affine: False omits weight and bias; bias: False omits the bias."""

    def __init__(
        self, size: int, epsilon: float, context: LayerContext, *, affine: bool = True, bias: bool = True
    ) -> None:
        vectors = [torch.empty(size, dtype=context.dtype, device=context.device) for _ in range(affine * (1 + bias))]
        weight, shift, *_ = (*vectors, None, None)
        self.weights = NormWeights(size, weight, shift, epsilon, centred=True)
        self._operations = context.operations

    def __call__(self, x: Value) -> Value:
        """[..., size] -> the same shape and dtype."""
        return self._operations.norm(self.weights, x)

    def slots(self) -> WeightSlots:
        named = (("weight", self.weights.weight, 1.0), ("bias", self.weights.bias, 0.0))
        return {name: _slot(vector, mean) for name, vector, mean in named if vector is not None}


def _slot(vector: torch.Tensor | None, mean: float, offset: float = 0.0) -> WeightSlot:
    assert vector is not None, "a norm with weights has this one"
    return WeightSlot(tuple(vector.shape), partial(_load, vector, offset), vector.nbytes, mean, 0.0)


def _load(vector: torch.Tensor, offset: float, source: WeightSource) -> None:
    copy_into(vector, source)
    if offset:
        vector.add_(offset)
