"""Rules on single tokens: logit bias, penalties, bans before `min_tokens`, allowed tokens. All edit scores in place.
scores: [R, vocab_size] float32."""

from __future__ import annotations

import numpy as np

from quire.sampling.batch import SampleBatch, TokenMasks
from quire.sampling.lists import ALLOWED, BANNED, BIAS, STOP, RowLists

BANNED_SCORE = np.float32(-1e30)
"""Score of banned tokens: finite, so contradictory bans still leave a best token."""

HostBatch = SampleBatch[np.ndarray]


def add_logit_bias(scores: np.ndarray, lists: RowLists, batch: HostBatch) -> None:
    """Add each row's bias to its tokens (a token occurs once a row)."""
    for index, tokens, words in lists.select(BIAS, batch.rows):
        scores[index, tokens] += words[:, 0].view(np.float32)


def ban_stop_tokens(scores: np.ndarray, lists: RowLists, min_tokens: np.ndarray, batch: HostBatch) -> None:
    """Ban the stop tokens of rows that generated fewer than `min_tokens` ([R] int64) tokens."""
    early = np.flatnonzero(batch.num_generated < min_tokens)
    if not early.size:
        return
    for index, tokens, _ in lists.select(STOP, batch.rows[early]):
        _ban(scores, early[index], tokens)


def ban_sequences(scores: np.ndarray, lists: RowLists, batch: HostBatch) -> None:
    num_generated = batch.num_generated
    for index, tokens, prefixes in lists.select(BANNED, batch.rows):
        size = prefixes.shape[1]
        found = np.flatnonzero(num_generated[index] >= size)
        if size:
            where = index[found]
            recent = batch.token_table[batch.rows[where, None], batch.lengths[where, None] + np.arange(-size, 0)]
            found = found[(prefixes[found] == recent).all(axis=1)]
        _ban(scores, index[found], tokens[found])


def keep_allowed(scores: np.ndarray, lists: RowLists, batch: HostBatch) -> None:
    """Make other tokens impossible, row by row, which needs memory for one row's list only."""
    words = lists.words()
    starts, counts = lists.spans(ALLOWED, batch.rows)
    for index in np.flatnonzero(counts).tolist():
        tokens = words[starts[index] : starts[index] + counts[index]]
        allowed_scores = scores[index, tokens]
        scores[index] = -np.inf
        scores[index, tokens] = allowed_scores


def keep_masked(scores: np.ndarray, masks: TokenMasks) -> None:
    """Make other tokens impossible, row by row."""
    for index, words in zip(masks.indices.tolist(), masks.words, strict=True):
        bits = np.unpackbits(words.astype("<u4").view(np.uint8), count=scores.shape[1], bitorder="little")
        scores[index, bits == 0] = -np.inf


def _ban(scores: np.ndarray, index: np.ndarray, tokens: np.ndarray) -> None:
    scores[index, tokens] = np.minimum(scores[index, tokens], BANNED_SCORE)


def apply_repetition_penalty(scores: np.ndarray, penalty: np.ndarray, batch: HostBatch) -> None:
    """Divide positive and multiply negative scores of prompt and output tokens by `penalty` ([R] float32, 1 is off)."""
    rows = np.flatnonzero(penalty != 1)
    index, tokens, _ = _seen_tokens(batch, rows, np.zeros(len(rows), np.int64), scores.shape[1])
    values, factors = scores[index, tokens], penalty[index]
    scores[index, tokens] = np.where(values > 0, values / factors, values * factors)


def apply_output_penalties(scores: np.ndarray, presence: np.ndarray, frequency: np.ndarray, batch: HostBatch) -> None:
    """Subtract `presence` once and `frequency` per occurrence ([R] float32, 0 is off) from the scores of generated
    tokens."""
    rows = np.flatnonzero((presence != 0) | (frequency != 0))
    index, tokens, counts = _seen_tokens(batch, rows, batch.num_prompt_tokens[rows], scores.shape[1])
    scores[index, tokens] -= presence[index] + frequency[index] * counts.astype(np.float32)


def _seen_tokens(
    batch: HostBatch, index: np.ndarray, starts: np.ndarray, vocab_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(batch index, token, occurrences) of the distinct tokens from `starts` on."""
    sizes = batch.lengths[index] - starts
    flat_index = np.repeat(index, sizes)
    first_entry = np.cumsum(sizes) - sizes
    columns = np.arange(len(flat_index)) + np.repeat(starts - first_entry, sizes)
    tokens = batch.token_table[batch.rows[flat_index], columns]
    keys, counts = np.unique(flat_index * vocab_size + tokens, return_counts=True)
    seen_index, seen_tokens = np.divmod(keys, vocab_size)
    return seen_index, seen_tokens, counts
