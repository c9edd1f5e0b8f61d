"""Choosing tokens and ranking log-probabilities over the vocabulary, natively."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.kernels.cpu import _native
from quire.kernels.cpu.runtime import NativeRuntime

MOST_RANKED: int = _native.MOST_RANKED
"""The largest `num_top` of `VocabularyKernels.rank`."""


Choose = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, bool], list[int]]
"""(scores, rows, lengths, num_prompt_tokens, table, greedy): a token for each row of `scores` ([R, vocab_size] float32,
overwritten where a row is drawn), -1 where the row has NaN or plus infinity or no finite score. Writes it (0 for -1)
behind the row's last one in the table.

rows: [R] int64, each row's place in the columns and the table. lengths, num_prompt_tokens: [R] int64, tokens of its
sequence; their difference and the seed decide what is drawn. table: [num_rows, capacity] int32. greedy: all rows have
temperature 0. Arrays that are those of the last call are not asked for their memory again.
"""


class VocabularyKernels:
    """The kernels, bound to the columns of sampling parameters that they look rows up in.

    temperature: [num_rows] float32, 0 takes the best token. top_k: [num_rows] int64, 0 or less is off. top_p:
    [num_rows] float64, 1 is off. min_p: [num_rows] float32, 0 is off. seed: [num_rows] uint64. They are read at each
    call, so they may change between calls but not be replaced. Not for two calls at a time.
    """

    def __init__(
        self,
        runtime: NativeRuntime,
        temperature: np.ndarray,
        top_k: np.ndarray,
        top_p: np.ndarray,
        min_p: np.ndarray,
        seed: np.ndarray,
    ) -> None:
        self._kernels = _native.VocabularyKernels(runtime.isa, runtime.pool)
        self._columns = (temperature, top_k, top_p, min_p, seed)  # kept alive: the kernels hold their addresses
        self._kernels.bind(*self._columns)
        self.choose: Choose = self._kernels.choose

    def rank(
        self, logits: np.ndarray, tokens: np.ndarray, num_top: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The place of one token ([N] int64) in each row of `logits` ([N, vocab_size] float32): its log-probability
        ([N] float32; NaN for a row with non-finite logits, of which nothing else is valid) and its rank ([N] int64, 1
        for the best). Then the `num_top` best tokens ([N, width] int64; width at most vocab_size; of equal ones the
        lowest first) and their log-probabilities ([N, width] float32)."""
        count, vocab_size = logits.shape
        width = min(num_top, vocab_size)
        logprobs, ranks = np.empty(count, np.float32), np.empty(count, np.int64)
        top_tokens, top_logprobs = np.empty((count, width), np.int64), np.empty((count, width), np.float32)
        self._kernels.rank(logits, tokens, logprobs, ranks, top_tokens, top_logprobs)
        return logprobs, ranks, top_tokens, top_logprobs

    def keep_masked(self, scores: np.ndarray, indices: np.ndarray, words: np.ndarray) -> None:
        """Make impossible (minus infinity) what masks do not allow. scores: [R, vocab_size] float32, edited in place.
        indices: [M] int64, the row of each mask. words: [M, ceil(vocab_size / 32)] uint32, token t at bit t % 32 of
        word t // 32."""
        self._kernels.keep_masked(scores, indices, words)

    def lowest_kept(self, weights: np.ndarray, total: float, top_k: int, top_p: float, min_p: float) -> float:
        """The lowest weight that the filters keep in one row. weights: [n] float32 in [0, 1], the largest 1; total:
        what they add up to."""
        return float(self._kernels.lowest_kept(weights, total, top_k, top_p, min_p))
