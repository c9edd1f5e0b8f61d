"""Plain weights on a GPU: the library's matrix products, or batch-invariant ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from quire.kernels.arguments import ExpertWeights
from quire.kernels.experts import count_rows
from quire.kernels.triton.activation import activation
from quire.kernels.triton.embedding import embedding
from quire.kernels.triton.experts import ExpertMatrices, apply_experts
from quire.kernels.triton.matmul import head_matmul, matmul
from quire.kernels.triton.weight_formats import StoredMatrix
from quire.quantization.unquantized import PlainParameters, PlainStack, UnquantizedLinear


class DeviceLinear(UnquantizedLinear):
    """LinearMethod of plain weights on a GPU, computed without waiting for the device. batch_invariant: see
    `quire.kernels.triton.matmul`."""

    def __init__(self, dtype: torch.dtype, *, batch_invariant: bool) -> None:
        super().__init__(dtype)
        self.batch_invariant = batch_invariant

    def apply(self, parameters: PlainParameters, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        has_activation = parameters.shape.activation is not None
        assert not has_activation or residual is None, "what an activation gives is not added to a residual"
        products = self.products(parameters, x, residual)
        return self.activate(parameters, products) if has_activation else products

    def products(
        self, parameters: PlainParameters, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._product(x, parameters.weight, parameters.bias, residual)

    def activate(self, parameters: PlainParameters, products: torch.Tensor) -> torch.Tensor:
        shape = parameters.shape
        return products if shape.activation is None else activation(products, shape.activation, gated=shape.gated)

    def lookup(
        self, parameters: PlainParameters, indices: torch.Tensor, onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        return embedding(parameters.weight, indices, onto)

    def apply_heads(self, stack: Sequence[PlainParameters], x: torch.Tensor) -> torch.Tensor:
        assert isinstance(stack, PlainStack), "made by create_stack"
        weight = stack.weights
        if self.batch_invariant:
            return head_matmul(x, weight)
        product = torch.bmm(x.unflatten(1, (len(weight), -1)).transpose(0, 1), weight.transpose(1, 2))
        return product.transpose(0, 1).flatten(1)

    def apply_experts(
        self, weights: ExpertWeights, x: torch.Tensor, routing: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        gate_up, down, gating = weights.gate_up, weights.down, weights.gating
        assert isinstance(gate_up, PlainStack), "made by create_stack"
        assert not weights.places, "a device has all experts"
        assert isinstance(down, PlainStack), "made by create_stack"
        count_rows(weights.counts, routing)
        stored = StoredMatrix.plain(gate_up.weights), StoredMatrix.plain(down.weights)
        adapters = None if weights.adapters is None else weights.adapters.on_device(x)
        matrices = ExpertMatrices(*stored, gate_up.biases, down.biases, adapters=adapters)
        gated = gating.activation, gating.limit, weights.weighs_input
        return apply_experts(matrices, x, routing, residual, *gated, batch_invariant=self.batch_invariant)

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        if self.batch_invariant:
            return matmul(x, weight, bias, residual)
        if residual is None:
            return F.linear(x, weight, bias)
        if bias is None:
            return residual.addmm_(x, weight.t())
        return residual.add_(F.linear(x, weight, bias))
