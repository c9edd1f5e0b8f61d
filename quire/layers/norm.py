"""Normalisation over the last dimension, each row by itself."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from quire.layers.context import LayerContext, WeightSlot, WeightSlots
from quire.quantization.integer_weight import copy_into


class RMSNorm:
    """x / rms(x) * weight, the statistics in float32."""

    def __init__(self, size: int, epsilon: float, context: LayerContext) -> None:
        self._weight = torch.empty(size, dtype=context.dtype, device=context.device)
        self._epsilon = epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> the same shape and dtype."""
        wide = x.float()
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self._epsilon)
        return (wide * scale).to(x.dtype) * self._weight

    def slots(self) -> WeightSlots:
        return {"weight": WeightSlot(tuple(self._weight.shape), partial(copy_into, self._weight), 1.0, 0.0)}


class LayerNorm:
    """(x - mean) / deviation * weight + bias; `affine` False leaves out the last two."""

    def __init__(self, size: int, epsilon: float, context: LayerContext, *, affine: bool = True) -> None:
        self._size = (size,)
        self._epsilon = epsilon
        self._weight = torch.empty(size, dtype=context.dtype, device=context.device) if affine else None
        self._bias = torch.empty(size, dtype=context.dtype, device=context.device) if affine else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> the same shape and dtype."""
        return F.layer_norm(x, self._size, self._weight, self._bias, self._epsilon)

    def slots(self) -> WeightSlots:
        if self._weight is None or self._bias is None:
            return {}
        return {
            "weight": WeightSlot(self._size, partial(copy_into, self._weight), 1.0, 0.0),
            "bias": WeightSlot(self._size, partial(copy_into, self._bias), 0.0, 0.0),
        }
