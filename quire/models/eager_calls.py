"""Single operations, called with tensors, for modelling code that only knows tensors (`transformers_model.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch

from quire.attention.interface import PlannedStep
from quire.layers.context import LayerContext
from quire.layers.operations import HeadWeights
from quire.quantization.interface import LayerLinear

Linear = Callable[[torch.Tensor], torch.Tensor]
"""[T, in_features] -> [T, out_features]."""
Lookup = Callable[[torch.Tensor], torch.Tensor]
"""[T] int64 -> [T, size]."""
Attend = Callable[[torch.Tensor, PlannedStep], torch.Tensor]
"""qkv as `Operations.attend` takes it, and the step of the attention back end -> [T, num_heads * value_width]."""


class EagerCalls(Protocol):
    """Makes functions of tensors out of the weights and operations of a layer context."""

    def linear(self, method: LayerLinear, parameters: Any) -> Linear: ...

    def lookup(self, method: LayerLinear, parameters: Any) -> Lookup: ...

    def attend(self, heads: HeadWeights) -> Attend: ...

    def release(self) -> None:
        """Free working memory and references to the KV cache."""
        ...


class TensorCalls:
    """Instance of EagerCalls for contexts whose values are tensors."""

    def __init__(self, context: LayerContext) -> None:
        self._operations = context.operations

    def linear(self, method: LayerLinear, parameters: Any) -> Linear:
        return lambda x: cast("torch.Tensor", method.apply(parameters, x))

    def lookup(self, method: LayerLinear, parameters: Any) -> Lookup:
        return lambda indices: cast("torch.Tensor", method.lookup(parameters, indices))

    def attend(self, heads: HeadWeights) -> Attend:
        return lambda qkv, step: cast("torch.Tensor", self._operations.attend(heads, qkv, None, step))

    def release(self) -> None:
        """Nothing is kept."""
