"""Presence, frequency and repetition penalties, counted afresh from the row table at each step.

Nothing is kept between steps: forks, preemptions and late tokens cannot make counts wrong, and reading a row's
tokens (4 bytes each) is little beside reading their keys and values. Only seen tokens are touched.
"""

from __future__ import annotations

import numpy as np

from quire.sampling.batch import SampleBatch


def apply_repetition_penalty(scores: np.ndarray, penalty: np.ndarray, batch: SampleBatch) -> None:
    """Divide positive and multiply negative scores of tokens in prompt or output by `penalty`, in place.

    scores: [R, vocab_size] float32; penalty: [R] float32, 1 where off.
    """
    rows = np.flatnonzero(penalty != 1)
    index, tokens, _ = _seen_tokens(batch, rows, np.zeros(len(rows), np.int64), scores.shape[1])
    values, factors = scores[index, tokens], penalty[index]
    scores[index, tokens] = np.where(values > 0, values / factors, values * factors)


def apply_output_penalties(scores: np.ndarray, presence: np.ndarray, frequency: np.ndarray, batch: SampleBatch) -> None:
    """Subtract, in place, `presence` once and `frequency` per occurrence from the scores of generated tokens.

    scores: [R, vocab_size] float32; presence, frequency: [R] float32, 0 where off.
    """
    rows = np.flatnonzero((presence != 0) | (frequency != 0))
    index, tokens, counts = _seen_tokens(batch, rows, batch.num_prompt_tokens[rows], scores.shape[1])
    scores[index, tokens] -= presence[index] + frequency[index] * counts.astype(np.float32)


def _seen_tokens(
    batch: SampleBatch, index: np.ndarray, starts: np.ndarray, vocab_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct tokens from `starts` on of the batch's sequences `index`: (batch index, token, occurrences)."""
    sizes = batch.lengths[index] - starts
    flat_index = np.repeat(index, sizes)
    first_entry = np.cumsum(sizes) - sizes
    columns = np.arange(len(flat_index)) + np.repeat(starts - first_entry, sizes)
    tokens = batch.token_ids[batch.rows[flat_index], columns]
    keys, counts = np.unique(flat_index * vocab_size + tokens, return_counts=True)
    seen_index, seen_tokens = np.divmod(keys, vocab_size)
    return seen_index, seen_tokens, counts
