"""Mixtures of experts in torch: the reference of the kernels, and the fallback without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.kernels.activation import ACTIVATIONS
from quire.kernels.arguments import ExpertWeights, Gating, Routing, RowCounts

Product = Callable[[Any, torch.Tensor], torch.Tensor]
"""Function of one expert's matrix (in the linear method's form) and x: [T, K] -> [T, N], bias included; each row
depends only on its own x."""


def route(routing: Routing, logits: torch.Tensor) -> torch.Tensor:
    """[T, num_experts] -> [T, 2 * top_k] float32; see `Operations.route`. Ties go to the lower expert number."""
    wide = logits.float()
    scores = torch.softmax(wide, dim=-1) if routing.scoring == "softmax" else _sigmoid(wide)
    # Different logits can round to equal scores, so logits decide unless a bias or groups need scores.
    preference = wide if routing.bias is None and routing.num_groups == 1 else scores
    if routing.bias is not None:
        preference = preference + routing.bias
    if routing.num_groups > 1:
        preference = _open_groups(routing, preference)
    chosen = preference.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k].sort(dim=-1).values
    weights = scores.gather(1, chosen)
    if routing.renormalise:
        total = weights[:, :1]
        for column in range(1, routing.top_k):
            total = total + weights[:, column : column + 1]
        weights = weights / total
    return torch.cat((chosen.float(), weights * routing.factor), dim=1)


def gate_rows(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate) per row, in x's dtype, computed in float32. x: [T, width]; gate: [T, 1]."""
    return (x.float() * _sigmoid(gate.float())).to(x.dtype)


def experts(
    weights: ExpertWeights, x: torch.Tensor, routing: torch.Tensor, residual: torch.Tensor | None, product: Product
) -> torch.Tensor:
    """Results of a mixture's experts (`LinearMethod.apply_experts`), in plain torch. Sums are float32, in order of the
    experts' numbers."""
    count_rows(weights.counts, routing)
    top_k = routing.shape[1] // 2
    chosen, shares = routing[:, :top_k].long(), routing[:, top_k:]
    if weights.places is not None:
        place, copies, turn = weights.places.long()[chosen].unbind(-1)
        is_own = torch.arange(len(x))[:, None] % copies == turn
        chosen = torch.where(is_own, place, -1)
    parts = torch.full((len(x), top_k, x.shape[1]), -0.0, dtype=torch.float32, device=x.device)
    slots = None if weights.adapters is None else weights.adapters.slots_of(x)
    for expert in chosen.unique().tolist():
        if expert < 0:
            continue
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        own, own_slots = x.index_select(0, rows), None if slots is None else slots[rows]
        parts[rows, places] = _expert(weights, expert, own, shares[rows, places, None], product, own_slots)
    if weights.apart:
        return parts.flatten(1)
    out = _added(parts, shares, weighs_input=weights.weighs_input).to(x.dtype)
    return out if residual is None else residual + out


def add_experts(
    parts: torch.Tensor, routing: torch.Tensor, residual: torch.Tensor, *, weighs_input: bool
) -> torch.Tensor:
    top_k = routing.shape[1] // 2
    out = _added(parts.unflatten(1, (top_k, -1)), routing[:, top_k:], weighs_input=weighs_input)
    return residual + out.to(residual.dtype)


def _added(parts: torch.Tensor, shares: torch.Tensor, *, weighs_input: bool) -> torch.Tensor:
    """Weighted sum, in order, of experts' results: [T, top_k, size] -> [T, size]."""
    out = torch.zeros_like(parts[:, 0])
    for place in range(parts.shape[1]):
        part = parts[:, place]
        out = out + (part if weighs_input else part * shares[:, place, None])
    return out


def count_rows(counts: RowCounts | None, routing: torch.Tensor) -> None:
    """Count the rows of each expert, without waiting for the device. routing: [T, 2 * top_k]."""
    if counts is None:
        return
    chosen = routing[:, : routing.shape[1] // 2].long()
    counted = torch.ones_like(chosen)
    if counts.num_rows is not None:
        is_real = torch.arange(len(chosen), device=chosen.device) < counts.num_rows
        counted = is_real[:, None].expand_as(chosen).long()
        # Padding rows may hold any number.
        chosen = torch.where(is_real[:, None], chosen, 0)
    counts.by_expert.scatter_add_(0, chosen.flatten(), counted.flatten())


def gated(gating: Gating, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """activation(gate) * up, as `gating` says: [T, width] each -> [T, width]."""
    if gating.limit is not None:
        gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit) + 1.0
    return ACTIVATIONS[gating.activation](gate) * up


def _expert(
    weights: ExpertWeights,
    expert: int,
    x: torch.Tensor,
    share: torch.Tensor,
    product: Product,
    slots: torch.Tensor | None,
) -> torch.Tensor:
    """One expert's result: [N, size] -> [N, size] float32. share: [N, 1] float32, weight, applied only if
    `weighs_input`. slots: [N]."""
    if weights.weighs_input:
        x = (x.float() * share).to(x.dtype)
    adapters, wide = weights.adapters, product(weights.gate_up[expert], x)
    if adapters is not None and slots is not None:
        wide = adapters.add_to_products("gate_up_proj", expert, x, wide, slots)
    inner = gated(weights.gating, *wide.chunk(2, dim=-1))
    out = product(weights.down[expert], inner)
    if adapters is not None and slots is not None:
        out = adapters.add_to_products("down_proj", expert, inner, out, slots)
    return out.float()


def _open_groups(routing: Routing, preference: torch.Tensor) -> torch.Tensor:
    """`preference` ([T, num_experts]) with minus infinity outside the best groups."""
    members = preference.unflatten(1, (routing.num_groups, -1))
    best = members.sort(dim=-1, descending=True).values[..., : routing.group_best]
    worth = best[..., 0]
    for place in range(1, best.shape[-1]):
        worth = worth + best[..., place]
    order = worth.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_groups]
    is_open = torch.zeros_like(worth, dtype=torch.bool).scatter(1, order, True)
    return torch.where(is_open[:, :, None], members, -torch.inf).flatten(1)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Sigmoid with bits that do not depend on the element's place (see `kernels/activation.py`)."""
    return 1.0 / (torch.exp(-x) + 1.0)
