"""Last projections of models, to logits of tokens or labels."""

from __future__ import annotations

from typing import Protocol

from quire.kernels.value import Value
from quire.layers.context import LayerContext, WeightSlots
from quire.layers.linear import ColumnParallelLinear
from quire.layers.saved_matrices import SavedMatrices


class OutputHead(Protocol):
    @property
    def input_size(self) -> int:
        """Size of the hidden states that it takes."""
        ...

    def __call__(self, hidden: Value) -> Value:
        """[R, input_size] -> [R, logits]."""
        ...

    def slots(self) -> WeightSlots:
        """Weight slots by checkpoint names."""
        ...


class HeadLinear:
    """Linear layer of a classifier's head, whole on each rank. name: the checkpoint's."""

    def __init__(self, name: str, in_features: int, outputs: int, *, bias: bool, context: LayerContext) -> None:
        self._name, self._operations, self._adapters = name, context.operations, context.adapters
        self._linear = ColumnParallelLinear(in_features, (outputs,), bias=bias, context=context.replicated())
        self._saved = None
        if context.adapters is not None and context.adapters.storage.adds_in_torch:
            self._saved = SavedMatrices(context.adapters, (outputs, in_features), has_bias=bias)
            context.adapters.saved[name] = self._saved

    def __call__(self, x: Value) -> Value:
        """[R, in_features] -> [R, outputs]."""
        y = self._linear(x)
        if self._saved is None or self._adapters is None or self._adapters.step is None:
            return y
        return self._operations.add_head_adapted(self._saved, x, y, self._adapters.step)

    def slots(self) -> WeightSlots:
        return self._linear.slots((self._name,))
