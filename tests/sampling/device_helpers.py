"""The platform of Triton's kernels for the cases of `tests.sampling.helpers`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.kernels.triton.sampling_shapes import SamplingShapes
from quire.sampling.parameters import NUM_WORDS, SamplingRows
from quire.sampling.results import SampledTokens
from quire.sampling.triton_kernels import TritonKernels
from tests.sampling.helpers import Case, sample

SMALL = SamplingShapes(segment=64, lanes=32, tile=64, listed=32, ranked=24, num_warps=4)
"""Several segments, tiles and lists that overflow, in vocabularies of hundreds."""
LANES = 64
OFFSET, STRIDE = 7, NUM_WORDS + 4
"""Where the parameters lie in the arena, and words from row to row."""


def pageable(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Host memory that is not pinned: copies from it wait."""
    return torch.empty(tuple(shape), dtype=dtype)


class Device:
    """Kernels on a device."""

    def __init__(self, device: torch.device, shapes: SamplingShapes = SMALL) -> None:
        self._device = device
        self._shapes = shapes

    def array(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(self._device)

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.clone().to(self._device)

    def kernels(self, rows: SamplingRows) -> TritonKernels:
        num_rows = len(rows.features)
        arena = torch.full((OFFSET + num_rows * STRIDE,), -1, dtype=torch.int32, device=self._device)
        words = arena[OFFSET:].view(num_rows, STRIDE)[:, :NUM_WORDS]
        return TritonKernels(rows, words, pageable, self._shapes, LANES)

    def write(self, kernels: TritonKernels, row: int, words: np.ndarray) -> None:
        kernels._words[row] = torch.from_numpy(words).to(self._device)


def sample_on(
    device: torch.device,
    logits: torch.Tensor,
    cases: Sequence[Case],
    *,
    rows: Sequence[int] | None = None,
    num_rows: int | None = None,
    shapes: SamplingShapes = SMALL,
) -> SampledTokens:
    """As `helpers.sample`, on a device."""
    return sample(logits, cases, rows=rows, num_rows=num_rows, platform=Device(device, shapes))
