"""Rules on single tokens: logit bias, penalties, bans before `min_tokens`, allowed tokens. All edit scores in place.

Penalties count tokens afresh from the request state at each step. Nothing is kept between steps: forks, preemptions and
late tokens cannot make counts wrong, and reading a sequence's tokens (4 bytes each) is little beside reading its keys
and values. Only seen tokens are touched.
"""

from __future__ import annotations

import numpy as np

from quire.sampling.batch import SampleBatch
from quire.sampling.ragged import RaggedColumn, TokenLists

BANNED_SCORE = np.float32(-1e30)
"""Finite on purpose. Beside any permitted token a banned one has probability exactly 0; a request whose bans
contradict its allowed tokens still has a best token among the allowed ones, instead of a row without any."""


def add_logit_bias(scores: np.ndarray, column: RaggedColumn, index_of_row: np.ndarray) -> None:
    """scores: [R, vocab_size] float32; adds each row's bias to its tokens (a token is named once a row)."""
    index, tokens, values = column.select(index_of_row)
    scores[index, tokens] += values


def ban_stop_tokens(
    scores: np.ndarray, column: RaggedColumn, min_tokens: np.ndarray, batch: SampleBatch, index_of_row: np.ndarray
) -> None:
    """Ban the stop tokens of rows that generated fewer than `min_tokens` ([R] int64) tokens."""
    index, tokens, _ = column.select(index_of_row)
    early = batch.num_generated[index] < min_tokens[index]
    ban(scores, index[early], tokens[early])


def keep_allowed(scores: np.ndarray, column: TokenLists, index_of_row: np.ndarray) -> None:
    """In rows that have a list of allowed tokens, make every other token impossible. Row by row: what a step needs
    besides the scores is one row's list, however many rows have it."""
    for index, tokens in column.select(index_of_row):
        allowed_scores = scores[index, tokens]
        scores[index] = -np.inf
        scores[index, tokens] = allowed_scores


def ban(scores: np.ndarray, index: np.ndarray, tokens: np.ndarray) -> None:
    """Ban token `tokens[i]` in row `index[i]`, in place. An impossible token (minus infinity) stays impossible."""
    scores[index, tokens] = np.minimum(scores[index, tokens], BANNED_SCORE)


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
