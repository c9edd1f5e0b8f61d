"""The group of one: collectives give back what they get."""

from __future__ import annotations

import torch


class SingleRank:
    """The null instance of ProcessGroup."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor
