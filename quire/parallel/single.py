"""Group of one rank: collectives return their argument."""

from __future__ import annotations

import torch

from quire.parallel.interface import ProcessGroup


class SingleRank:
    rank = 0
    size = 1
    native = None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        return tensor

    def barrier(self) -> None:
        """Return at once: there is no other rank."""


SINGLE_RANK: ProcessGroup = SingleRank()
"""One instance: it has no state."""
