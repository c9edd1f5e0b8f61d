"""A platform and a process group that a configuration can name for the ranks of a test."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from quire.config.engine import EngineConfig
from quire.parallel.interface import ProcessGroup
from quire.parallel.single import SINGLE_RANK
from quire.parallel.torch_dist import GlooGroup
from tests.fakes.host_math import HostMathPlatform, LateCopy, LateStreams

PLATFORM = "tests.fakes.rank_device:PairedPlatform"
COLLECTIVES = "tests.fakes.rank_device:CountingGroup"
PATIENCE = 60.0
"""Seconds: a guard against a rank that never takes the second plan."""


class CountingGroup(GlooGroup):
    """Knows how many sums it has made."""

    def __init__(self, meeting_point: Path, rank: int, size: int) -> None:
        super().__init__(meeting_point, rank, size)
        self.num_sums = 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_sums += 1
        return super().all_reduce(tensor)


class PairedStreams(LateStreams):
    """The results of every other step are there when the next step has been launched, and not before."""

    def __init__(self) -> None:
        super().__init__()
        self._first: threading.Event | None = None

    def copy_out(self, tensors: Iterable[torch.Tensor]) -> Any:
        if self._first is not None:
            self._first.set()
            self._first = None
            return LateCopy(list(tensors))
        self._first = threading.Event()
        return HeldCopy(list(tensors), self._first)


class HeldCopy(LateCopy):
    def __init__(self, tensors: list[torch.Tensor], next_step: threading.Event) -> None:
        super().__init__(tensors)
        self._next_step = next_step

    def wait(self) -> list[torch.Tensor]:
        assert self._next_step.wait(PATIENCE), "the rank waits for a result before it takes the next plan"
        return super().wait()


class PairedPlatform(HostMathPlatform):
    """A device on the host, whose steps end in pairs."""

    def __init__(self, config: EngineConfig, group: ProcessGroup = SINGLE_RANK) -> None:
        super().__init__(config, group)
        self.streams = PairedStreams()

    def describe(self) -> str:
        return f"steps in pairs over {type(self._group).__name__}, which has made {self._group.num_sums} sums"
