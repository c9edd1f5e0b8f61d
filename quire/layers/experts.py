"""Mixtures of experts in torch: what routing and experts mean, and what computes them where there is no kernel. A
row's bits do not depend on what else is in a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

from quire.kernels.arguments import Routing, RowCounts
from quire.kernels.experts import gate_rows, route

ValueT = TypeVar("ValueT")


@dataclass
class ExpertCounters:
    """Where mixtures of experts put their counters, one after the other. num_rows: as RowCounts has it; set before
    each pass."""

    by_layer: list[torch.Tensor] = field(default_factory=list)
    num_rows: torch.Tensor | None = None

    def add_layer(self, num_experts: int, device: torch.device) -> RowCounts:
        """Zeros."""
        self.by_layer.append(torch.zeros(num_experts, dtype=torch.int64, device=device))
        return RowCounts(self.by_layer[-1], self.num_rows)


class ExpertOperations(Protocol[ValueT]):
    """The operations of mixtures of experts besides the experts' own products, which are of the linear method."""

    def route(self, routing: Routing, logits: ValueT) -> ValueT:
        """[T, num_experts] -> [T, 2 * top_k] float32: the numbers of each token's experts, ascending, then their
        weights."""
        ...

    def gate_rows(self, x: ValueT, gate: ValueT) -> ValueT:
        """[T, width], [T, 1] -> [T, width]: x * sigmoid(gate), a factor for each row."""
        ...


class TorchExpertOperations:
    """Instance of ExpertOperations over tensors of any device, which it never waits for."""

    def route(self, routing: Routing, logits: torch.Tensor) -> torch.Tensor:
        return route(routing, logits)

    def gate_rows(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gate_rows(x, gate)
