"""Ranks as threads of this process, with collectives over their shared memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")
PATIENCE = 60.0
"""Seconds: a guard against a rank that never joins a collective."""


class Exchange:
    """Where the ranks leave what they give to a collective."""

    def __init__(self, size: int) -> None:
        self.given: list[torch.Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size)


class ThreadRank:
    """Implements ProcessGroup."""

    native = None

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self._exchange = exchange
        self.rank = rank
        self.size = len(exchange.given)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        first, *others = self._gather(tensor)
        for other in others:
            first = first + other
        return first

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self._gather(tensor), dim=dim)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        return self._gather(tensor)[source]

    def barrier(self) -> None:
        self._exchange.barrier.wait(PATIENCE)

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._exchange.given[self.rank] = tensor.clone()
        self.barrier()
        given = [each for each in self._exchange.given if each is not None]
        assert len({each.shape for each in given}) == 1, "ranks give tensors of one shape"
        self.barrier()
        return given


def run_ranks(size: int, work: Callable[[ThreadRank], Result]) -> list[Result]:
    """Run `work` once for each rank, side by side; the results in rank order. Raises the first rank's error."""
    exchange = Exchange(size)

    def run(rank: int) -> Result:
        try:
            return work(ThreadRank(exchange, rank))
        except BaseException:
            exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(size)]]
