"""Counters of the rows that each expert computes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from quire.kernels.arguments import RowCounts


@dataclass
class ExpertCounters:
    """Counters by mixture of experts, in order. num_rows: see `RowCounts`; set each pass."""

    by_layer: list[torch.Tensor] = field(default_factory=list)
    num_rows: torch.Tensor | None = None

    def add_layer(self, num_experts: int, device: torch.device) -> RowCounts:
        self.by_layer.append(torch.zeros(num_experts, dtype=torch.int64, device=device))
        return RowCounts(self.by_layer[-1], self.num_rows)
