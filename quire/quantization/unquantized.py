"""Plain weights in the model's dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

import torch
import torch.nn.functional as F

from quire.kernels.activation import ACTIVATIONS
from quire.kernels.arguments import ExpertWeights
from quire.kernels.experts import experts
from quire.kernels.matmul import row_head_linear, row_linear
from quire.quantization.integer_weight import WeightTensor, copy_into
from quire.quantization.interface import LinearShape, Parameters


@dataclass(frozen=True, slots=True)
class PlainParameters:
    """Unquantised weights of one linear layer. weight: [out_features, in_features]; bias: [out_features] or None."""

    shape: LinearShape
    weight: torch.Tensor
    bias: torch.Tensor | None

    def stored(self) -> list[torch.Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


@dataclass(frozen=True, slots=True)
class PlainStack(Sequence[PlainParameters]):
    """Matrices of one shape in one tensor. weights: [count, out_features, in_features]. biases: [count, out_features],
    or None."""

    shape: LinearShape
    weights: torch.Tensor
    biases: torch.Tensor | None

    def __len__(self) -> int:
        return len(self.weights)

    @overload
    def __getitem__(self, index: int) -> PlainParameters: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PlainParameters]: ...
    def __getitem__(self, index: int | slice) -> PlainParameters | Sequence[PlainParameters]:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        bias = None if self.biases is None else self.biases[index]
        return PlainParameters(self.shape, self.weights[index], bias)


class UnquantizedLinear:
    """LinearMethod of plain torch tensors in `dtype`, with batch-invariant rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def create(self, shape: LinearShape) -> PlainParameters:
        size = (shape.out_features, shape.in_features)
        weight = torch.empty(size, dtype=self._dtype, device=shape.device)
        bias = torch.empty(size[0], dtype=self._dtype, device=shape.device) if shape.bias else None
        return PlainParameters(shape, weight, bias)

    def create_stack(self, shape: LinearShape, count: int) -> PlainStack:
        whole = self.create(replace(shape, out_features=count * shape.out_features))
        parts = (count, shape.out_features)
        return PlainStack(
            shape, whole.weight.unflatten(0, parts), None if whole.bias is None else whole.bias.unflatten(0, parts)
        )

    def load_rows(
        self, parameters: PlainParameters, suffix: str, tensor: WeightTensor, first_row: int, num_rows: int
    ) -> None:
        target = parameters.weight if suffix == "weight" else parameters.bias
        assert target is not None, "a bias is loaded only where the shape has one"
        copy_into(target[first_row : first_row + num_rows], tensor)

    def apply(self, parameters: PlainParameters, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        out = self.activate(parameters, row_linear(x, parameters.weight, parameters.bias))
        return out if residual is None else residual + out

    def products(
        self, parameters: PlainParameters, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = row_linear(x, parameters.weight, parameters.bias)
        return out if residual is None else residual + out

    def is_interleaved(self, parameters: Parameters) -> bool:
        return False

    def activate(self, parameters: PlainParameters, products: torch.Tensor) -> torch.Tensor:
        shape = parameters.shape
        if shape.gated:
            assert shape.activation is not None, "a gate has an activation"
            gate, up = products.chunk(2, dim=-1)
            return ACTIVATIONS[shape.activation](gate) * up
        return products if shape.activation is None else ACTIVATIONS[shape.activation](products)

    def lookup(
        self, parameters: PlainParameters, indices: torch.Tensor, onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = F.embedding(indices, parameters.weight)
        return rows if onto is None else onto + rows

    def lookup_share(
        self, parameters: PlainParameters, indices: torch.Tensor, first_row: int, num_rows: int
    ) -> torch.Tensor:
        local = indices - first_row
        is_own = (local >= 0) & (local < parameters.shape.out_features)
        return self.lookup(parameters, local * is_own).masked_fill(~is_own[:, None], 0)

    def apply_heads(self, stack: Sequence[PlainParameters], x: torch.Tensor) -> torch.Tensor:
        assert isinstance(stack, PlainStack), "made by create_stack"
        return row_head_linear(x, stack.weights)

    def apply_experts(
        self, weights: ExpertWeights, x: torch.Tensor, routing: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        return experts(weights, x, routing, residual, lambda each, rows: row_linear(rows, each.weight, each.bias))

    def stored_bytes(self, shape: Sequence[int]) -> int:
        return math.prod(shape) * self._dtype.itemsize
