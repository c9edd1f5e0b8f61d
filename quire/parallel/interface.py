"""Ranks that share a model's layers."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class ExchangedLayer(Protocol):
    size: int
    top_k: int

    def record_experts(self, x: Any, routing: Any, residual: Any) -> Any:
        """x and residual [T, size], routing [T, 2 * top_k] -> [T, size]."""
        ...


class ExpertExchange(Protocol):
    """Exchange between replicas that share experts. Ranks are numbered replica by replica."""

    rank: int
    size: int
    native: Any

    def add_layer(self, layer: ExchangedLayer) -> None: ...

    def begin_step(self) -> None:
        """Warm-up before the first call runs alone."""
        ...

    def join_step(self) -> None:
        """Step without rows."""
        ...

    def release_workspaces(self) -> None: ...


class ProcessGroup(Protocol):
    """Fixed set of ranks, which call the collectives in the same order, with tensors of one shape and dtype; results
    are new tensors, or the argument for one rank."""

    @property
    def rank(self) -> int:
        """This rank, 0 <= rank < size."""
        ...

    @property
    def size(self) -> int: ...

    @property
    def native(self) -> Any:
        """Handle with which native programs record collectives (`_native.SharedRanks`); None: they call back into
        torch."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, added in rank order on every rank (so all hold the same bits)."""
        ...

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Ranks' tensors side by side along `dim`, in rank order."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Tensor of rank `source`."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called it (at the end of joining)."""
        ...
