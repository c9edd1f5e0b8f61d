"""What a model ends with: the projection of hidden states to logits, of tokens or of labels."""

from __future__ import annotations

from typing import Protocol

from quire.kernels.value import Value
from quire.layers.context import WeightSlots


class OutputHead(Protocol):
    """The projection behind the layers."""

    @property
    def input_size(self) -> int:
        """Elements of a hidden state that it takes."""
        ...

    def __call__(self, hidden: Value) -> Value:
        """[R, input_size] -> [R, logits]."""
        ...

    def slots(self) -> WeightSlots:
        """Where the tensors of a checkpoint go."""
        ...
