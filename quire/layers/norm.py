"""Normalisation over the last dimension, each row by itself."""

from __future__ import annotations

from functools import partial

import torch

from quire.kernels.value import Value
from quire.layers.context import LayerContext, WeightSlot, WeightSlots
from quire.layers.operations import NormWeights
from quire.quantization.integer_weight import WeightSource, copy_into


class RMSNorm:
    """x / rms(x) * weight, the statistics in float32."""

    offset = 0.0
    """What is added to a checkpoint's weights."""

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
    """x / rms(x) * (1 + weight) of Gemma. The sum is kept in float32: in 16 bits it would lose most of the weight."""

    offset = 1.0


class LayerNorm:
    """(x - mean) / deviation * weight + bias; `affine` False leaves out the last two."""

    def __init__(self, size: int, epsilon: float, context: LayerContext, *, affine: bool = True) -> None:
        weight = torch.empty(size, dtype=context.dtype, device=context.device) if affine else None
        bias = torch.empty(size, dtype=context.dtype, device=context.device) if affine else None
        self.weights = NormWeights(size, weight, bias, epsilon, centred=True)
        self._operations = context.operations

    def __call__(self, x: Value) -> Value:
        """[..., size] -> the same shape and dtype."""
        return self._operations.norm(self.weights, x)

    def slots(self) -> WeightSlots:
        if self.weights.weight is None:
            return {}
        return {"weight": _slot(self.weights.weight, 1.0), "bias": _slot(self.weights.bias, 0.0)}


def _slot(vector: torch.Tensor | None, mean: float, offset: float = 0.0) -> WeightSlot:
    assert vector is not None, "a norm with weights has this one"
    return WeightSlot(tuple(vector.shape), partial(_load, vector, offset), vector.nbytes, mean, 0.0)


def _load(vector: torch.Tensor, offset: float, source: WeightSource) -> None:
    copy_into(vector, source)
    if offset:
        vector.add_(offset)
