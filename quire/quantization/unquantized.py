"""Plain weights in the model's dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from quire.kernels.activation import ACTIVATIONS
from quire.kernels.matmul import row_linear
from quire.layers.experts import ExpertWeights, experts
from quire.quantization.integer_weight import WeightTensor, copy_into
from quire.quantization.interface import LinearShape


@dataclass(frozen=True, slots=True)
class PlainParameters:
    """weight: [out_features, in_features]; bias: [out_features] or None."""

    shape: LinearShape
    weight: torch.Tensor
    bias: torch.Tensor | None


class UnquantizedLinear:
    """The plain instance of LinearMethod: torch tensors in `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def create(self, shape: LinearShape) -> PlainParameters:
        size = (shape.out_features, shape.in_features)
        weight = torch.empty(size, dtype=self._dtype, device=shape.device)
        bias = torch.empty(size[0], dtype=self._dtype, device=shape.device) if shape.bias else None
        return PlainParameters(shape, weight, bias)

    def create_stack(self, shape: LinearShape, count: int) -> list[PlainParameters]:
        """Parts of one tensor: [count, out_features, in_features], and one of biases."""
        whole = self.create(replace(shape, out_features=count * shape.out_features))
        weights = whole.weight.unflatten(0, (count, shape.out_features))
        biases = [None] * count if whole.bias is None else list(whole.bias.unflatten(0, (count, shape.out_features)))
        return [PlainParameters(shape, weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    def load_rows(
        self, parameters: PlainParameters, suffix: str, tensor: WeightTensor, first_row: int, num_rows: int
    ) -> None:
        target = parameters.weight if suffix == "weight" else parameters.bias
        assert target is not None, "a bias is loaded only where the shape has one"
        copy_into(target[first_row : first_row + num_rows], tensor)

    def apply(self, parameters: PlainParameters, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        shape = parameters.shape
        out = row_linear(x, parameters.weight, parameters.bias)
        if shape.gated:
            assert shape.activation is not None, "a gate has an activation"
            gate, up = out.chunk(2, dim=-1)
            out = ACTIVATIONS[shape.activation](gate) * up
        elif shape.activation is not None:
            out = ACTIVATIONS[shape.activation](out)
        return out if residual is None else residual + out

    def lookup(
        self, parameters: PlainParameters, indices: torch.Tensor, onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = F.embedding(indices, parameters.weight)
        return rows if onto is None else onto + rows

    def apply_experts(
        self, weights: ExpertWeights, x: torch.Tensor, routing: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        return experts(weights, x, routing, residual, lambda each, rows: row_linear(rows, each.weight, each.bias))

    def stored_bytes(self, shape: Sequence[int]) -> int:
        return math.prod(shape) * self._dtype.itemsize
