"""Interface of a model's last projection, to logits of tokens or labels."""

from __future__ import annotations

from typing import Protocol

from quire.kernels.value import Value
from quire.layers.context import WeightSlots


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
