"""Rules on single tokens: logit bias, bans before `min_tokens`, allowed tokens. All edit the scores in place."""

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
