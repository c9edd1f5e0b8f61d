"""A platform whose second rank samples other tokens than the first from the third step on."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.sampling.parameters import SamplingRows
from quire.worker.platform.cpu import CpuPlatform

PLATFORM = "tests.fakes.wrong_rank:WrongRankPlatform"


class WrongKernels:
    """Sampling kernels that choose the worst token from the third step on."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self._num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def choose(self, scores: np.ndarray, batch: Any, used: int) -> Any:
        self._num_steps += 1
        return self._kernels.choose(-scores if self._num_steps > 2 else scores, batch, used)


class WrongRankPlatform(CpuPlatform):
    def _make_sampling_kernels(self, rows: SamplingRows) -> Any:
        kernels = super()._make_sampling_kernels(rows)
        return WrongKernels(kernels) if self._group.rank else kernels
