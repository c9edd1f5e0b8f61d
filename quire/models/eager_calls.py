"""Operations called with tensors, for modelling code that only knows tensors (`transformers_model.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch

from quire.attention.interface import PlannedStep
from quire.kernels.arguments import HeadWeights
from quire.kernels.value import Value
from quire.layers.context import LayerContext
from quire.quantization.interface import LayerLinear

Layer = Callable[[Value], Value]
"""A layer of ours, over any kind of values: [T, width] -> [T, another width]."""
Compute = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""[T, width] -> the results of several layers; rows may be apart."""
Lookup = Callable[[torch.Tensor], torch.Tensor]
"""[T] int64 -> [T, size]."""


class Attend(Protocol):
    def __call__(self, qkv: torch.Tensor, rotation: torch.Tensor | None, step: PlannedStep) -> Sequence[torch.Tensor]:
        """qkv: as `Operations.attend` takes it, used up. rotation: [T, head_dim], cosines beside sines of half a head's
        angles, where `EagerCalls.rotates` (None: heads are rotated already). step: of the attention back end. Returns
        [T, num_heads * value_width], and the results of the layers behind it."""
        ...


class EagerCalls(Protocol):
    """Makes functions of tensors out of the weights and operations of a layer context."""

    rotates: bool
    """Whether attention rotates queries and keys."""

    def layers(self, layers: Sequence[Layer], first: Layer | None = None) -> Compute:
        """The results of `layers` of one input. first: a layer between: its result, and theirs of that."""
        ...

    def lookup(self, method: LayerLinear, parameters: Any) -> Lookup: ...

    def attend(self, heads: HeadWeights, behind: Sequence[Layer]) -> Attend:
        """behind: layers of what attention computes."""
        ...

    def release(self) -> None:
        """Free working memory and references to the KV cache."""
        ...


class TensorCalls:
    """Instance of EagerCalls for contexts whose values are tensors."""

    rotates = False

    def __init__(self, context: LayerContext) -> None:
        self._operations = context.operations

    def layers(self, layers: Sequence[Layer], first: Layer | None = None) -> Compute:
        def compute(x: torch.Tensor) -> list[torch.Tensor]:
            if first is None:
                return [cast("torch.Tensor", layer(x)) for layer in layers]
            between = cast("torch.Tensor", first(x))
            return [between, *(cast("torch.Tensor", layer(between)) for layer in layers)]

        return compute

    def lookup(self, method: LayerLinear, parameters: Any) -> Lookup:
        return lambda indices: cast("torch.Tensor", method.lookup(parameters, indices))

    def attend(self, heads: HeadWeights, behind: Sequence[Layer]) -> Attend:
        def attend(qkv: torch.Tensor, rotation: torch.Tensor | None, step: PlannedStep) -> list[torch.Tensor]:
            assert rotation is None, "heads come rotated"
            attended = cast("torch.Tensor", self._operations.attend(heads, qkv, None, step))
            return [attended, *(cast("torch.Tensor", layer(attended)) for layer in behind)]

        return attend

    def release(self) -> None:
        """Nothing is kept."""
