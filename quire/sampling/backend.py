"""Sampler back ends: they choose tokens and compute log-probabilities over the whole vocabulary.

Two exist: `PlainSampler` defines the semantics in NumPy and torch, `NativeSampler` does the same with native kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from quire.kernels.cpu.runtime import NativeRuntime
from quire.kernels.cpu.sampling import MOST_RANKED, VocabularyKernels
from quire.sampling.batch import SampleBatch
from quire.sampling.errors import NonFiniteLogitsError
from quire.sampling.parameters import Feature, SamplingRows
from quire.sampling.plain import PlainSampler, best_tokens
from quire.step import TokenLogprobs


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


class NativeSampler:
    """One kernel call for a batch, whatever its rows ask for."""

    def __init__(self, rows: SamplingRows, runtime: NativeRuntime) -> None:
        self._kernels = VocabularyKernels(runtime, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed)

    def choose(self, scores: np.ndarray, batch: SampleBatch, used: int) -> np.ndarray:
        greedy = not used & Feature.RANDOM
        token_ids, sound = self._kernels.choose(scores, batch.rows, batch.num_generated, greedy=greedy)
        if not sound:
            raise NonFiniteLogitsError(np.flatnonzero(token_ids < 0).tolist())
        return token_ids

    def logprobs(self, logits: np.ndarray, token_ids: np.ndarray, num_top: Sequence[int]) -> list[TokenLogprobs]:
        chosen, ranks, top_tokens, top_values = self._kernels.rank(logits, token_ids, max(num_top, default=0))
        bad = np.flatnonzero(np.isnan(chosen))
        if bad.size:
            raise NonFiniteLogitsError(bad.tolist())
        columns = (token_ids, chosen, top_tokens, top_values, ranks)
        entries = zip(*(column.tolist() for column in columns), num_top, strict=True)
        return [
            TokenLogprobs([token, *tokens[:count]], [value, *values[:count]], rank)
            for token, value, tokens, values, rank, count in entries
        ]

    def best(self, scores: np.ndarray, num_best: int) -> np.ndarray:
        if num_best > MOST_RANKED:
            return best_tokens(scores, num_best)
        return self._kernels.rank(scores, scores.argmax(axis=1), num_best)[2]


def make_sampler_backend(rows: SamplingRows, runtime: NativeRuntime | None) -> SamplerBackend:
    """runtime: the native kernels that the worker computes with; None: plain operators."""
    if runtime is None:
        return PlainSampler(rows)
    return NativeSampler(rows, runtime)
