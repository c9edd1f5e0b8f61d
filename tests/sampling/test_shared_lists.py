"""What the sequences of one request have in common is converted once, and let go of with the last of them."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire.sampling.batch import SampleBatch
from quire.sampling.parameters import SamplingRows
from quire.sampling.rules import ban_sequences, keep_allowed
from quire.sampling_params import SamplingParams
from quire.step import SequenceSampling

NUM_ROWS = 128
VOCAB = 60_000
PROMPT = 3


@pytest.fixture
def traced() -> Iterator[None]:
    gc.collect()
    tracemalloc.start()
    yield
    tracemalloc.stop()


def siblings(bad: list[list[int]] | None = None, **params: Any) -> list[SequenceSampling]:
    """What the sequences of one request bring: they share the lists."""
    shared, bad = SamplingParams(**params), bad or []
    return [SequenceSampling(shared, seed, [], bad) for seed in range(NUM_ROWS)]


def batch_of(generated: list[int]) -> SampleBatch[np.ndarray]:
    """All rows have generated the same tokens behind a prompt."""
    tokens = np.array([[7] * PROMPT + generated] * NUM_ROWS, np.int32)
    lengths = np.full(NUM_ROWS, PROMPT + len(generated), np.int64)
    index = np.arange(NUM_ROWS)
    return SampleBatch(index, index, lengths, np.full(NUM_ROWS, PROMPT, np.int64), tokens)


def test_allowed_tokens_of_a_request_are_one_array(traced: None) -> None:
    rows, scores = SamplingRows(NUM_ROWS), np.zeros((NUM_ROWS, VOCAB), np.float32)
    requests = siblings(allowed_token_ids=list(range(0, VOCAB, 2)))
    before, _ = tracemalloc.get_traced_memory()
    for row, sampling in enumerate(requests):
        rows.set(row, sampling)
    keep_allowed(scores, rows.lists, batch_of([]))
    _, peak = tracemalloc.get_traced_memory()
    assert peak - before < 10 * (VOCAB // 2) * 8, "lists, one conversion and what a step needs for one row"
    assert (scores[:, ::2] == 0).all()
    assert (scores[:, 1::2] == -np.inf).all()
    for row in range(NUM_ROWS):
        rows.clear(row)
    after, _ = tracemalloc.get_traced_memory()
    assert after - before < 100_000


def test_bad_words_of_a_request_are_as_large_as_they_are_long(traced: None) -> None:
    """A long one among many short ones does not make all of them as wide, and nothing stays."""
    rows, scores = SamplingRows(NUM_ROWS), np.zeros((NUM_ROWS, 300), np.float32)
    bad = [[*range(200), 9], *([token % 256, 5] for token in range(2000))]
    num_tokens = sum(map(len, bad))
    before, _ = tracemalloc.get_traced_memory()
    for row, sampling in enumerate(siblings(bad)):
        rows.set(row, sampling)
    ban_sequences(scores, rows.lists, batch_of(list(range(200))))
    _, peak = tracemalloc.get_traced_memory()
    assert peak - before < NUM_ROWS * num_tokens * 50
    assert (scores[:, [5, 9]] < -1e29).all()
    assert (scores[:, [4, 6, 8, 10]] == 0).all()
    for row in range(NUM_ROWS):
        rows.clear(row)
    after, _ = tracemalloc.get_traced_memory()
    assert after - before < 100_000


def test_lists_of_other_requests_are_their_own() -> None:
    rows = SamplingRows(4)
    first, second = (SamplingParams(allowed_token_ids=tokens) for tokens in ([1], [2]))
    for row, params in enumerate((first, second, first)):
        rows.set(row, SequenceSampling(params, 0, [], []))
    rows.clear(0)
    rows.set(1, SequenceSampling(SamplingParams(), 0, [], []))
    scores = np.zeros((4, 5), np.float32)
    keep_allowed(scores, rows.lists, SampleBatch(*[np.arange(4)] * 4, np.zeros((4, 9), np.int32)))
    assert np.isfinite(scores).sum(axis=1).tolist() == [5, 5, 1, 5]
    assert scores[2, 1] == 0
