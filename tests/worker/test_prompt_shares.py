"""Dealing of a step's tokens to ranks."""

from __future__ import annotations

import numpy as np
import pytest

from quire.worker.input_batch import InputBatch
from quire.worker.platform.shared_inputs import LEAST_TOKENS, batch_of_tokens, owners


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_attend_to_as_many_keys(num_ranks: int) -> None:
    """Tokens differ by the remainder of one cut, keys by a hundredth; the last token is the first rank's."""
    owner = owners(np.array([1000]), num_ranks)
    assert owner is not None
    tokens = np.bincount(owner)
    keys = np.bincount(owner, weights=np.arange(1, 1001))
    assert len(tokens) == num_ranks
    assert tokens.max() - tokens.min() <= 2
    assert keys.max() / keys.min() < 1.01
    assert owner[0] == owner[-1] == 0


def test_short_sequences_fill_up() -> None:
    """Whole, each to the rank with the fewest tokens."""
    counts = np.array([1, 41, 1, 3, 1])
    owner = owners(counts, 2)
    assert owner is not None
    assert [len(set(part)) for part in np.split(owner, np.cumsum(counts)[:-1])] == [1, 2, 1, 1, 1]
    assert abs(np.diff(np.bincount(owner))[0]) <= 3


@pytest.mark.parametrize("counts", [[1] * 200, [3] * 60, [2 * LEAST_TOKENS - 1, 1, 1], []])
def test_steps_without_long_prompts_are_whole(counts: list[int]) -> None:
    assert owners(np.array(counts, np.int64), 2) is None


def test_every_token_is_in_one_batch() -> None:
    """Rows and positions of two ranks' batches are those of the whole one, in runs of successive positions."""
    batch = InputBatch.of(np.array([5, 2, 7]), np.array([10, 0, 99]), np.array([33, 40, 1]))
    owner = owners(batch.counts, 2)
    assert owner is not None
    places = np.stack((batch.rows[batch.sequence_index], batch.positions))
    for rank in range(2):
        tokens = np.flatnonzero(owner == rank)
        part = batch_of_tokens(batch, tokens)
        assert part.num_tokens == len(tokens)
        assert len(part.rows) <= 2 * len(batch.rows)
        assert np.array_equal(np.stack((part.rows[part.sequence_index], part.positions)), places[:, tokens])
    assert np.array_equal(batch_of_tokens(batch, np.arange(74)).counts, batch.counts)
