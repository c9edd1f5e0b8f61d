"""Plain weights on a GPU: the library's matrix products, or ones that are the same for a row in any batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.kernels.triton.activation import activation
from quire.kernels.triton.embedding import embedding
from quire.kernels.triton.matmul import matmul
from quire.layers.experts import ExpertWeights, gated
from quire.quantization.unquantized import PlainParameters, UnquantizedLinear


class DeviceLinear(UnquantizedLinear):
    """Instance of LinearMethod: stored as UnquantizedLinear does, computed without waiting for the device.

    A residual is added by the product itself where there is no bias, and written over: one pass less over it than a
    kernel of its own would take, and one rounding less. batch_invariant: see `quire.kernels.triton.matmul`.
    """

    def __init__(self, dtype: torch.dtype, *, batch_invariant: bool) -> None:
        super().__init__(dtype)
        self._batch_invariant = batch_invariant

    def apply(self, parameters: PlainParameters, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        shape, weight, bias = parameters.shape, parameters.weight, parameters.bias
        if shape.activation is not None:
            assert residual is None, "what an activation gives is not added to a residual"
            return activation(self._product(x, weight, bias, None), shape.activation, gated=shape.gated)
        return self._product(x, weight, bias, residual)

    def lookup(
        self, parameters: PlainParameters, indices: torch.Tensor, onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        return embedding(parameters.weight, indices, onto)

    def apply_experts(
        self, weights: ExpertWeights, x: torch.Tensor, routing: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Every expert computes all tokens: which of them chose it is never asked of the device."""
        top_k = routing.shape[1] // 2
        chosen, shares = routing[:, :top_k], routing[:, top_k:]
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, (gate_up, down) in enumerate(zip(weights.gate_up, weights.down, strict=True)):
            is_chosen = chosen == expert
            share = (shares * is_chosen).sum(dim=1, keepdim=True)
            rows = (x.float() * share).to(x.dtype) if weights.weighs_input else x
            gate, up = matmul(rows, gate_up.weight, gate_up.bias).chunk(2, dim=-1)
            result = matmul(gated(weights.gating, gate, up), down.weight, down.bias).float()
            result = result if weights.weighs_input else result * share
            out = torch.where(is_chosen.any(dim=1, keepdim=True), out + result, out)
        return out.to(x.dtype) if residual is None else residual + out.to(x.dtype)

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        if self._batch_invariant:
            return matmul(x, weight, bias, residual)
        if residual is None:
            return F.linear(x, weight, bias)
        if bias is None:
            return residual.addmm_(x, weight.t())
        return residual.add_(F.linear(x, weight, bias))
