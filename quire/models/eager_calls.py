"""Operations on tensors, for modelling code without other values (`transformers_model.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch

from quire.attention.interface import AttentionStep
from quire.kernels.arguments import HeadWeights
from quire.kernels.value import Value
from quire.quantization.interface import LinearMethod

Layer = Callable[[Value], Value]
"""Layer over any kind of values: [T, width] -> [T, another width]."""
Compute = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""[T, width] -> results of several layers; rows need not be contiguous."""
Lookup = Callable[[torch.Tensor], torch.Tensor]
"""[T] int64 -> [T, size]."""


class Attend(Protocol):
    def __call__(self, qkv: torch.Tensor, rotation: torch.Tensor | None, step: AttentionStep) -> Sequence[torch.Tensor]:
        """Compute one layer's attention. qkv: see `AttentionStep.attend`; overwritten. rotation: [T, head_dim], cosines
        beside sines of half a head's angles if `EagerCalls.rotates`, else None (already rotated). Returns [T, num_heads
        * value_width] and the results of the following layers."""
        ...


class EagerCalls(Protocol):
    """Factory of tensor functions from a layer context's weights and operations, for Transformers' modules."""

    rotates: bool
    """True if attention rotates queries and keys."""

    def layers(self, layers: Sequence[Layer], first: Layer | None = None) -> Compute:
        """Function: `layers`' results for one input. first: layer before them, whose result comes first."""
        ...

    def lookup(self, method: LinearMethod, parameters: Any) -> Lookup: ...

    def attention(self, heads: HeadWeights, behind: Sequence[Layer]) -> Attend:
        """Function that computes attention and the layers behind it. behind: layers applied to the attention's
        result."""
        ...

    def release(self) -> None:
        """Free working memory and references to the KV cache, as `release_workspaces`."""
        ...


class TensorCalls:
    """EagerCalls that call the layers directly on torch tensors (no recorded program)."""

    rotates = False

    def layers(self, layers: Sequence[Layer], first: Layer | None = None) -> Compute:
        def compute(x: torch.Tensor) -> list[torch.Tensor]:
            if first is None:
                return [cast("torch.Tensor", layer(x)) for layer in layers]
            between = cast("torch.Tensor", first(x))
            return [between, *(cast("torch.Tensor", layer(between)) for layer in layers)]

        return compute

    def lookup(self, method: LinearMethod, parameters: Any) -> Lookup:
        return lambda indices: cast("torch.Tensor", method.lookup(parameters, indices))

    def attention(self, heads: HeadWeights, behind: Sequence[Layer]) -> Attend:
        def compute(qkv: torch.Tensor, rotation: torch.Tensor | None, step: AttentionStep) -> list[torch.Tensor]:
            assert rotation is None, "heads come rotated"
            attended = cast("torch.Tensor", step.attend(heads, qkv, None))
            return [attended, *(cast("torch.Tensor", layer(attended)) for layer in behind)]

        return compute

    def release(self) -> None:
        """Does nothing."""
