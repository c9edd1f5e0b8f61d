"""The batched sampler for host memory: the recipe. Each ingredient has a file of its own.

It works on NumPy views of the logits: on a CPU that is several times faster than the same torch operators, and every
operator used gives a row the same bits whatever the other rows are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.sampling.batch import SampleBatch
from quire.sampling.draw import compute_weights, cumulative_blocks, draw
from quire.sampling.errors import NonFiniteLogitsError
from quire.sampling.filters import apply_filters
from quire.sampling.logprobs import log_probabilities, token_logprobs
from quire.sampling.parameters import NEEDS_INDEX_OF_ROW, Feature, SamplingRows
from quire.sampling.penalties import apply_output_penalties, apply_repetition_penalty
from quire.sampling.randomness import uniform
from quire.sampling.rules import add_logit_bias, ban_stop_tokens, keep_allowed
from quire.step import TokenLogprobs

SLICE_ELEMENTS = 2**20
"""Random rows are drawn by slices of about this many weights, which bounds memory and stays in the cache."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """token_ids: [R] int64, aligned with the batch. logprobs: batch index -> logprobs, where asked for."""

    token_ids: np.ndarray
    logprobs: dict[int, TokenLogprobs]


class Sampler:
    """Chooses one token per row. Holds no state of its own: all of it is in the rows and the batch."""

    def __init__(self, rows: SamplingRows) -> None:
        self._rows = rows

    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> SampledTokens:
        """logits: [R, vocab_size] float32 on the host; may be overwritten.

        Raises NonFiniteLogitsError when a row has NaN or plus infinity, or no finite logit at all.
        """
        rows = self._rows
        used = rows.used(batch.rows)
        # 1. The model's own log-probabilities, before anything changes.
        wants_logprobs, log_probs = np.empty(0, np.int64), None
        if used & Feature.LOGPROBS:
            wants_logprobs = np.flatnonzero(rows.features[batch.rows] & Feature.LOGPROBS)
            log_probs = log_probabilities(logits[torch.from_numpy(wants_logprobs)])
        # 2. Bias, penalties, bans, allowed tokens.
        scores = logits.numpy()
        self._edit(scores, batch, used)
        # 3. Greedy rows take the best score, the others draw.
        if not used & Feature.RANDOM:
            token_ids = _best(scores)
        elif not used & Feature.GREEDY:
            token_ids = self._draw(scores, np.arange(len(scores)), batch, used)
        else:
            is_random = (rows.features[batch.rows] & Feature.RANDOM) != 0
            greedy, random = np.flatnonzero(~is_random), np.flatnonzero(is_random)
            token_ids = np.empty(len(scores), np.int64)
            token_ids[greedy] = _best(scores[greedy], greedy)
            token_ids[random] = self._draw(scores, random, batch, used)
        # 4. Log-probabilities of what was chosen.
        if log_probs is None:
            return SampledTokens(token_ids, {})
        num_top = rows.num_logprobs[batch.rows[wants_logprobs]].tolist()
        chosen = torch.from_numpy(token_ids[wants_logprobs])
        entries = token_logprobs(log_probs, chosen, num_top)
        return SampledTokens(token_ids, dict(zip(wants_logprobs.tolist(), entries, strict=True)))

    def _edit(self, scores: np.ndarray, batch: SampleBatch, used: int) -> None:
        """Change the scores in place, in this order, by the features that the batch uses."""
        rows, where = self._rows, batch.rows
        index_of_row = rows.index_of_row(where) if used & NEEDS_INDEX_OF_ROW else np.empty(0, np.int64)
        if used & Feature.LOGIT_BIAS:
            add_logit_bias(scores, rows.logit_bias, index_of_row)
        if used & Feature.REPETITION_PENALTY:
            apply_repetition_penalty(scores, rows.repetition_penalty[where], batch)
        if used & Feature.OUTPUT_PENALTIES:
            apply_output_penalties(scores, rows.presence_penalty[where], rows.frequency_penalty[where], batch)
        if used & Feature.MIN_TOKENS:
            ban_stop_tokens(scores, rows.stop_tokens, rows.min_tokens[where], batch, index_of_row)
        if used & Feature.BAD_WORDS:
            rows.bad_words.apply(scores, batch, index_of_row)
        if used & Feature.ALLOWED_TOKENS:
            keep_allowed(scores, rows.allowed_tokens, index_of_row)

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


def _best(scores: np.ndarray, index: np.ndarray | None = None) -> np.ndarray:
    """The token of the highest score per row, of several equal ones the lowest. index: what to call the rows."""
    token_ids = scores.argmax(axis=1)
    # NumPy's argmax stops at a NaN, so looking at the winner is looking at the row.
    finite = np.isfinite(scores[np.arange(len(scores)), token_ids])
    if not finite.all():
        bad = np.flatnonzero(~finite)
        raise NonFiniteLogitsError((bad if index is None else index[bad]).tolist())
    return token_ids
