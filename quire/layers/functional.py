"""Mixtures of experts in torch: what these operations mean, and what computes them where there is no kernel. A row's
bits do not depend on what else is in a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from quire.kernels.activation import ACTIVATIONS
from quire.kernels.matmul import row_linear

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""x: [T, K], weight: [N, K], bias: [N] or None -> [T, N]; a row depends on its own x alone."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen for a token. scoring: softmax over all experts, or the sigmoid of each score. renormalise:
    the weights of the chosen add up to 1. factor: of the weights. bias: [num_experts] float32, added to the scores
    for the choice alone, or None."""

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    factor: float = 1.0
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Gated feed-forward blocks. gate_up: [num_experts, 2 * intermediate, size], gate above up; down: [num_experts,
    size, intermediate]. activation: a name of `kernels/activation.py`."""

    gate_up: torch.Tensor
    down: torch.Tensor
    activation: str


def route(routing: Routing, logits: torch.Tensor) -> torch.Tensor:
    """[T, num_experts] -> [T, num_experts] float32: the weights of a token's top_k experts, 0 for all others. Of equal
    scores, the expert with the lower number is chosen."""
    wide = logits.float()
    scores = torch.softmax(wide, dim=-1) if routing.scoring == "softmax" else 1.0 / (torch.exp(-wide) + 1.0)
    preference = scores if routing.bias is None else scores + routing.bias
    chosen = preference.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, chosen)
    if routing.renormalise:
        total = weights[:, :1]
        for column in range(1, routing.top_k):
            total = total + weights[:, column : column + 1]
        weights = weights / total
    return torch.zeros_like(scores).scatter(1, chosen, weights * routing.factor)


def experts(weights: ExpertWeights, x: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
    """x: [T, size]. routing: [T, num_experts], as `route` gives it. Returns [T, size]: the weighted sum of the chosen
    experts' results, added in the order of their numbers. An expert computes the tokens that chose it."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(weights.down)):
        rows = routing[:, expert].nonzero().squeeze(1)
        if len(rows):
            result = _expert(weights, expert, x.index_select(0, rows), row_linear) * routing[rows, expert, None]
            out.index_copy_(0, rows, out.index_select(0, rows) + result)
    return out.to(x.dtype)


def experts_without_waiting(
    weights: ExpertWeights, x: torch.Tensor, routing: torch.Tensor, product: Product
) -> torch.Tensor:
    """As `experts`, but every expert computes all tokens: which of them chose it is never asked of the device."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(weights.down)):
        weight = routing[:, expert, None]
        result = _expert(weights, expert, x, product) * weight
        out = torch.where(weight == 0, out, out + result)
    return out.to(x.dtype)


def _expert(weights: ExpertWeights, expert: int, x: torch.Tensor, product: Product) -> torch.Tensor:
    """[N, size] -> [N, size] float32."""
    gate, up = product(x, weights.gate_up[expert], None).chunk(2, dim=-1)
    return product(ACTIVATIONS[weights.activation](gate) * up, weights.down[expert], None).float()
