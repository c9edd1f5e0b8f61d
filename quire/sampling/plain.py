"""The plain sampler back end: NumPy on the scores, torch for log-probabilities; the reference for the other ones.

On a CPU NumPy is several times faster here than the same torch operators, and every operator used gives a row the
same bits whatever the other rows are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.sampling.batch import SampleBatch
from quire.sampling.draw import compute_weights, cumulative_blocks, draw, uniform
from quire.sampling.errors import NonFiniteLogitsError
from quire.sampling.filters import apply_filters
from quire.sampling.logprobs import log_probabilities, token_logprobs
from quire.sampling.parameters import Feature, SamplingRows
from quire.step import TokenLogprobs

SLICE_ELEMENTS = 2**20
"""Random rows are drawn by slices of about this many weights, which bounds memory and stays in the cache."""


class PlainSampler:
    """See `quire.sampling.backend.SamplerBackend`."""

    def __init__(self, rows: SamplingRows) -> None:
        self._rows = rows

    def choose(self, scores: np.ndarray, batch: SampleBatch, used: int) -> np.ndarray:
        if not used & Feature.RANDOM:
            return _best(scores)
        if not used & Feature.GREEDY:
            return self._draw(scores, np.arange(len(scores)), batch, used)
        is_random = (self._rows.features[batch.rows] & Feature.RANDOM) != 0
        greedy, random = np.flatnonzero(~is_random), np.flatnonzero(is_random)
        token_ids = np.empty(len(scores), np.int64)
        token_ids[greedy] = _best(scores[greedy], greedy)
        token_ids[random] = self._draw(scores, random, batch, used)
        return token_ids

    def logprobs(self, logits: np.ndarray, token_ids: np.ndarray, num_top: Sequence[int]) -> list[TokenLogprobs]:
        log_probs = log_probabilities(torch.from_numpy(logits))
        return token_logprobs(log_probs, torch.from_numpy(token_ids), num_top)

    def best(self, scores: np.ndarray, num_best: int) -> np.ndarray:
        return best_tokens(scores, num_best)

    def _draw(self, scores: np.ndarray, index: np.ndarray, batch: SampleBatch, used: int) -> np.ndarray:
        """Draw a token for each of the batch's rows `index`. Returns [len(index)] int64."""
        uniforms = uniform(self._rows.seed[batch.rows[index]], batch.num_generated[index])
        step = max(1, SLICE_ELEMENTS // scores.shape[1])
        parts = [
            self._draw_slice(scores, index[start : start + step], uniforms[start : start + step], batch, used)
            for start in range(0, len(index), step)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _draw_slice(
        self, scores: np.ndarray, index: np.ndarray, uniforms: np.ndarray, batch: SampleBatch, used: int
    ) -> np.ndarray:
        rows, where = self._rows, batch.rows[index]
        with np.errstate(all="ignore"):  # NaN and infinite scores are looked for below
            weights = compute_weights(scores[index], rows.temperature[where])
            cumulative = cumulative_blocks(weights)
        bad = np.flatnonzero(~np.isfinite(cumulative[:, -1]))
        if bad.size:
            raise NonFiniteLogitsError(index[bad].tolist())
        if used & Feature.FILTERS:
            filtered = np.flatnonzero(rows.features[where] & Feature.FILTERS)
            some, at = weights[filtered], where[filtered]
            apply_filters(some, cumulative[filtered, -1], rows.top_k[at], rows.top_p[at], rows.min_p[at])
            weights[filtered], cumulative[filtered] = some, cumulative_blocks(some)
        return draw(weights, cumulative, uniforms)


def best_tokens(scores: np.ndarray, num_best: int) -> np.ndarray:
    """See `quire.sampling.backend.SamplerBackend.best`."""
    num_rows, vocab_size = scores.shape
    width = min(num_best, vocab_size)
    lowest = np.partition(scores, vocab_size - width, axis=1)[:, vocab_size - width]
    best = np.empty((num_rows, width), np.int64)
    for row in range(num_rows):
        # Of those that equal the lowest one some may be too many, hence sorted and in order of their ids.
        token_ids = np.flatnonzero(scores[row] >= lowest[row])
        best[row] = token_ids[np.argsort(-scores[row, token_ids], kind="stable")[:width]]
    return best


def _best(scores: np.ndarray, index: np.ndarray | None = None) -> np.ndarray:
    """The token of the highest score per row, of several equal ones the lowest. index: what to call the rows."""
    token_ids = scores.argmax(axis=1)
    # NumPy's argmax stops at a NaN, so looking at the winner is looking at the row.
    finite = np.isfinite(scores[np.arange(len(scores)), token_ids])
    if not finite.all():
        bad = np.flatnonzero(~finite)
        raise NonFiniteLogitsError((bad if index is None else index[bad]).tolist())
    return token_ids
