"""Sampler back ends: they choose tokens and compute log-probabilities over the whole vocabulary.

Two exist: `PlainSampler` defines the semantics in NumPy and torch, `NativeSampler` does the same with native kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from quire.sampling.batch import SampleBatch
from quire.sampling.parameters import SamplingRows
from quire.sampling.plain import PlainSampler
from quire.step import TokenLogprobs

if TYPE_CHECKING:
    from quire.kernels.cpu.runtime import NativeRuntime


class SamplerBackend(Protocol):
    """Bound to the rows of one worker. Row i of every result depends on row i of the arguments alone, bit by bit."""

    def choose(self, scores: np.ndarray, batch: SampleBatch, used: int) -> np.ndarray:
        """A token for each row: the best one of greedy rows (of several equal ones the lowest), a drawn one of others.

        scores: [R, vocab_size] float32, the elements of a row side by side; may be overwritten. used: the union of
        `Feature` over the batch. Returns [R] int64. Raises NonFiniteLogitsError, naming the rows, when rows have NaN
        or plus infinity, or no finite score at all.
        """
        ...

    def logprobs(self, logits: np.ndarray, token_ids: np.ndarray, num_top: Sequence[int]) -> list[TokenLogprobs]:
        """Log-probability and rank of one token per row, and the `num_top[i]` (at most MAX_LOGPROBS) best tokens of
        row i.

        logits: [N, vocab_size] float32, the elements of a row side by side; token_ids: [N] int64. Raises
        NonFiniteLogitsError with the indices of rows that hold NaN or plus infinity, or whose token is impossible.
        """
        ...

    def best(self, scores: np.ndarray, num_best: int) -> np.ndarray:
        """The `num_best` tokens of the highest scores of each row, best first, of several equal ones the lowest first.

        scores: [N, vocab_size] float32, the elements of a row side by side, each row with a finite score and none with
        NaN or plus infinity. Returns [N, min(num_best, vocab_size)] int64.
        """
        ...


def make_sampler_backend(rows: SamplingRows, runtime: NativeRuntime | None) -> SamplerBackend:
    """runtime: the native kernels that the worker computes with; None: plain operators."""
    if runtime is None:
        return PlainSampler(rows)
    from quire.sampling.native import NativeSampler  # the native module may not be built

    return NativeSampler(rows, runtime)
