"""Storage, loading and multiplication of a linear layer's weights: the interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from quire.kernels.arguments import ExpertWeights
from quire.kernels.value import AnyValue, Value
from quire.quantization.integer_weight import WeightTensor

Parameters: TypeAlias = Any
"""Stored weights of one linear layer; only its LinearMethod reads them."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Sizes of this rank's matrix. dtype: type of activations and plain weights. activation: name in
    `kernels/activation.py`, applied to the results, or None. gated: the matrix has gate rows above up rows, and the
    result is activation(gate) * up."""

    in_features: int
    out_features: int
    bias: bool
    dtype: torch.dtype
    device: torch.device
    activation: str | None = None
    gated: bool = False

    @property
    def width(self) -> int:
        return self.out_features // 2 if self.gated else self.out_features


class LinearMethod(Protocol):
    """Storage and products of linear layers' weights, chosen per platform by the loader."""

    def create(self, shape: LinearShape) -> Parameters:
        """Allocate "weight" and, if the shape has one, "bias". Every row of both must be loaded."""
        ...

    def create_stack(self, shape: LinearShape, count: int) -> Sequence[Parameters]:
        """Allocate `count` matrices of one shape, each loaded by itself, for `apply_experts` or `apply_heads`."""
        ...

    def load_rows(
        self, parameters: Parameters, suffix: str, tensor: WeightTensor, first_row: int, num_rows: int
    ) -> None:
        """Store, while loading, a checkpoint's tensor ([num_rows, in_features], or [num_rows] for a bias; any dtype) as
        the output rows first_row .. first_row + num_rows."""
        ...

    def apply(self, parameters: Parameters, x: AnyValue, residual: AnyValue | None = None) -> Value:
        """x: [T, in_features] -> [T, shape.width] in x's dtype: residual + activation(x W^T + bias). A row's result
        depends on that row alone and may overwrite the residual."""
        ...

    def products(self, parameters: Parameters, x: AnyValue, residual: AnyValue | None = None) -> Value:
        """`apply` before the activation: residual + x W^T + bias, [T, out_features]. If `is_interleaved`, gate and up
        alternate every 16 columns, and there may be padding columns."""
        ...

    def is_interleaved(self, parameters: Parameters) -> bool:
        """True if `products` of these loaded weights interleaves gate and up."""
        ...

    def activate(self, parameters: Parameters, products: AnyValue) -> Value:
        """Rest of `apply`: products -> [T, shape.width]. May overwrite the products."""
        ...

    def lookup(self, parameters: Parameters, indices: AnyValue, onto: AnyValue | None = None) -> Value:
        """Rows of the matrix: [T] int64 -> [T, in_features], added to `onto` (which may be overwritten) if given."""
        ...

    def lookup_share(self, parameters: Parameters, indices: AnyValue, first_row: int, num_rows: int) -> Value:
        """`lookup` in a table of `num_rows` rows shared among ranks; this matrix holds those from `first_row` on. Rows
        of other ranks are zeros."""
        ...

    def apply_heads(self, stack: Sequence[Parameters], x: AnyValue) -> Value:
        """x: [T, heads * in_features] -> [T, heads * out_features]: each head's columns times its own matrix of a stack
        without biases and activations. A row's result depends on that row alone."""
        ...

    def apply_experts(
        self, weights: ExpertWeights, x: AnyValue, routing: AnyValue, residual: AnyValue | None = None
    ) -> Value:
        """x: [T, size], routing: [T, 2 * top_k] of `Operations.route` -> [T, size] in x's dtype: residual + the
        weighted sum of chosen experts' results, in experts' order, without other ranks'. A row's result depends on that
        row alone and may overwrite the residual. `weights.apart` (no residual): [T, top_k * size] float32, each result
        before its weight; -0 for other ranks'."""
        ...

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Stored bytes of a matrix or bias of this shape, for memory estimates."""
        ...
