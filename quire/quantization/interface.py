"""How a linear layer's weights are stored, filled and multiplied: the interface for int8, int4 and packed weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from quire.kernels.arguments import ExpertWeights
from quire.kernels.value import AnyValue, Value
from quire.quantization.integer_weight import WeightTensor

Parameters: TypeAlias = Any
"""The stored weights of one linear layer; only its LinearMethod reads them."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Sizes of this rank's matrix; dtype is that of activations (and of plain weights).

    activation: name of the function (`kernels/activation.py`) that results go through, None for none. gated: the
    matrix is two, gate above up, and the result is activation(gate) * up.
    """

    in_features: int
    out_features: int
    bias: bool
    dtype: torch.dtype
    device: torch.device
    activation: str | None = None
    gated: bool = False

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.out_features // 2 if self.gated else self.out_features


class LinearMethod(Protocol):
    """One way to keep the weights of a linear layer. It takes and returns values of one kind."""

    def create(self, shape: LinearShape) -> Parameters:
        """Room for "weight" and, if the shape has one, "bias". Both must be loaded, every row of them."""
        ...

    def create_stack(self, shape: LinearShape, count: int) -> Sequence[Parameters]:
        """Room for `count` matrices of one shape, each to be loaded by itself, that `apply_experts` or
        `apply_heads` computes as one."""
        ...

    def load_rows(
        self, parameters: Parameters, suffix: str, tensor: WeightTensor, first_row: int, num_rows: int
    ) -> None:
        """Store a checkpoint's tensor ([num_rows, in_features], or [num_rows] for a bias; any dtype) as the output
        rows first_row .. first_row + num_rows."""
        ...

    def apply(self, parameters: Parameters, x: AnyValue, residual: AnyValue | None = None) -> Value:
        """x: [T, in_features] -> [T, shape.width] in x's dtype: residual + activation(x W^T + bias). A row's
        result depends on that row alone. The residual is used up: the result may be written over it."""
        ...

    def products(self, parameters: Parameters, x: AnyValue, residual: AnyValue | None = None) -> Value:
        """As `apply` before the activation: residual + x W^T + bias, [T, out_features]. Where `is_interleaved` says so,
        gate and up take turns of 16 columns, and there may be more columns than the two have."""
        ...

    def is_interleaved(self, parameters: Parameters) -> bool:
        """How `products` of these weights, which are loaded, lay out gate and up."""
        ...

    def activate(self, parameters: Parameters, products: AnyValue) -> Value:
        """What `apply` makes of its products: [T, shape.width]. They are used up."""
        ...

    def lookup(self, parameters: Parameters, indices: AnyValue, onto: AnyValue | None = None) -> Value:
        """Rows of the matrix: [T] int64 -> [T, in_features], added to `onto` (which is used up) when given."""
        ...

    def lookup_share(self, parameters: Parameters, indices: AnyValue, first_row: int, num_rows: int) -> Value:
        """As `lookup`, of a table of `num_rows` rows that ranks share out, of which this matrix is those from
        `first_row` on: the rows of others are zeros."""
        ...

    def apply_heads(self, stack: Sequence[Parameters], x: AnyValue) -> Value:
        """x: [T, heads * in_features] -> [T, heads * out_features]: each head's columns times its own matrix of a stack
        without biases and activations. A row's result depends on that row alone."""
        ...

    def apply_experts(
        self, weights: ExpertWeights, x: AnyValue, routing: AnyValue, residual: AnyValue | None = None
    ) -> Value:
        """x: [T, size], routing: [T, 2 * top_k] of `Operations.route` -> [T, size] in x's dtype: residual + the
        weighted sum of the chosen experts' results, added in the order of the experts. A row's result depends on that
        row alone. The residual is used up."""
        ...

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Bytes that a matrix or bias of this shape takes."""
        ...
