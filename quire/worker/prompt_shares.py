"""Dealing of a step's tokens to the ranks that share prompts: arithmetic that every rank does alike."""

from __future__ import annotations

import numpy as np

from quire.worker.input_batch import InputBatch

LEAST_TOKENS = 16
"""Tokens of prompts per rank from which on a step is dealt. Below, products read weights for nearly the same time, and
exchanges cost more than the rows that a rank is spared."""


def owners(counts: np.ndarray, num_ranks: int) -> np.ndarray | None:
    """Rank that computes each token of a step, [T] int64; None: every rank computes all. counts: [S] tokens of each
    sequence.

    A chunk is cut into two pieces per rank, and each rank takes an early one and the late one that mirrors it, so that
    ranks attend to about as many keys. Sequences too short for that go to the rank with the fewest tokens so far.
    """
    num_pieces = 2 * num_ranks
    is_long = counts >= num_pieces
    if counts[is_long].sum() < LEAST_TOKENS * num_ranks:
        return None
    takers = np.concatenate((np.arange(num_ranks), np.arange(num_ranks)[::-1]))
    dealt: list[np.ndarray] = [np.zeros(0, np.int64)] * len(counts)
    loads = np.zeros(num_ranks, np.int64)
    for index in np.flatnonzero(is_long).tolist():
        borders = counts[index] * np.arange(num_pieces + 1) // num_pieces
        dealt[index] = np.repeat(takers, np.diff(borders))
        loads += np.bincount(dealt[index], minlength=num_ranks)
    for index in np.flatnonzero(~is_long).tolist():
        taker = int(loads.argmin())
        dealt[index] = np.full(counts[index], taker, np.int64)
        loads[taker] += counts[index]
    return np.concatenate(dealt)


def batch_of_tokens(batch: InputBatch, tokens: np.ndarray) -> InputBatch:
    """Batch of some of a batch's tokens, at least one, int64: each run of successive tokens counts as a sequence."""
    sequences, positions = batch.sequence_index[tokens], batch.positions[tokens]
    is_first = np.ones(len(tokens), np.bool_)
    is_first[1:] = (np.diff(tokens) != 1) | (np.diff(sequences) != 0)
    firsts = np.flatnonzero(is_first)
    counts = np.diff(np.append(firsts, len(tokens)))
    return InputBatch.of(batch.rows[sequences[firsts]], positions[firsts], counts)
