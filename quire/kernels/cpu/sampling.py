"""Native sampling and ranking of log-probabilities over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.kernels.cpu import _native
from quire.kernels.cpu.runtime import NativeRuntime

MOST_RANKED: int = _native.MOST_RANKED
"""Largest `num_top` of `VocabularyKernels.rank`."""


Choose = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, bool], list[int]]
"""Function (scores, rows, lengths, num_prompt_tokens, table, greedy) that chooses a token per row of `scores` ([R,
vocab_size] float32, overwritten if a row is sampled), -1 for rows with NaN, plus infinity or no finite score, and
writes it (0 for -1) after the row's last one in the table. rows: [R] int64, index in the columns and the table.
lengths, num_prompt_tokens: [R] int64, which with the seed determine the sample. table: [num_rows, capacity] int32.
greedy: all temperatures are 0."""


class VocabularyKernels:
    """Native sampling kernels bound to the columns of sampling parameters. temperature: [num_rows] float32, 0: greedy.
    top_k: [num_rows] int64, <= 0: off. top_p: [num_rows] float64, 1: off. min_p: [num_rows] float32, 0: off. seed:
    [num_rows] uint64. Columns may change between calls but not be replaced. One call at a time."""

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
        """Rank one token ([N] int64) per row of `logits` ([N, vocab_size] float32). Returns its log-probability ([N]
        float32; NaN, and other results invalid, for non-finite logits), its rank ([N] int64, 1: best), the `num_top`
        best tokens ([N, width] int64; width <= vocab_size; ties by token id), and their log-probabilities ([N, width]
        float32)."""
        count, vocab_size = logits.shape
        width = min(num_top, vocab_size)
        logprobs, ranks = np.empty(count, np.float32), np.empty(count, np.int64)
        top_tokens, top_logprobs = np.empty((count, width), np.int64), np.empty((count, width), np.float32)
        self._kernels.rank(logits, tokens, logprobs, ranks, top_tokens, top_logprobs)
        return logprobs, ranks, top_tokens, top_logprobs

    def keep_masked(self, scores: np.ndarray, indices: np.ndarray, words: np.ndarray) -> None:
        """Set masked-out scores to minus infinity, in place. scores: [R, vocab_size] float32. indices: [M] int64, row
        of each mask. words: [M, ceil(vocab_size / 32)] uint32, token t at bit t % 32 of word t // 32."""
        self._kernels.keep_masked(scores, indices, words)

    def lowest_kept(self, weights: np.ndarray, total: float, top_k: int, top_p: float, min_p: float) -> float:
        """Lowest weight that the filters keep in one row. weights: [n] float32 in [0, 1], maximum 1; total: their
        sum."""
        return float(self._kernels.lowest_kept(weights, total, top_k, top_p, min_p))
