"""top-k, top-p, min-p against a reference of one row; equal weights; both ways of ranking."""

from __future__ import annotations

import numpy as np
import pytest

from quire.sampling import filters
from quire.sampling.filters import apply_filters
from quire.sampling_params import SamplingParams
from tests.sampling.helpers import Case, naive_probabilities


def filtered(weights: np.ndarray, **options: float) -> np.ndarray:
    count = len(weights)
    result = weights.copy()
    apply_filters(
        result,
        weights.astype(np.float64).sum(axis=1),
        np.full(count, options.get("top_k", 0), np.int64),
        np.full(count, options.get("top_p", 1.0)),
        np.full(count, options.get("min_p", 0.0), np.float32),
    )
    return result


@pytest.mark.parametrize("vocab_size", [3, 50, 1500])
@pytest.mark.parametrize("first_look", [2, 1024])
def test_same_tokens_as_the_reference(vocab_size: int, first_look: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "FIRST_LOOK", first_look)
    rng = np.random.default_rng(vocab_size)
    rows = []
    for _ in range(60):
        top_k = int(rng.choice([0, -1, 1, 2, 7, vocab_size, vocab_size + 9]))
        top_p = float(rng.choice([1.0, 0.05, 0.5, 0.9, 0.999]))
        min_p = float(rng.choice([0.0, 0.01, 0.3, 1.0]))
        rows.append(SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p))
    logits = rng.normal(size=(60, vocab_size)).astype(np.float32) * 3
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    result = weights.copy()
    apply_filters(
        result,
        weights.astype(np.float64).sum(axis=1),
        np.array([params.top_k for params in rows]),
        np.array([params.top_p for params in rows]),
        np.array([params.min_p for params in rows], np.float32),
    )
    for index, params in enumerate(rows):
        expected = naive_probabilities(logits[index], Case(params)) > 0
        assert (result[index] > 0).tolist() == expected.tolist(), params
        assert (result[index] == np.where(expected, weights[index], 0)).all()


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.9999])
def test_rows_whose_share_needs_more_than_the_first_look(top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steep rows are settled by the few largest weights, flat ones are sorted whole; the outcome is the same."""
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(20, 300)).astype(np.float32) * np.linspace(0.1, 9, 20, dtype=np.float32)[:, None]
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    whole = filtered(weights, top_p=top_p)
    monkeypatch.setattr(filters, "FIRST_LOOK", 8)
    assert filtered(weights, top_p=top_p).tobytes() == whole.tobytes()
    kept = (whole > 0).sum(axis=1)
    assert kept.min() < 8 < kept.max()
    for index in range(20):
        expected = naive_probabilities(logits[index], Case(SamplingParams(top_p=top_p))) > 0
        assert (whole[index] > 0).tolist() == expected.tolist()


def test_equal_weights_live_or_die_together() -> None:
    weights = np.array([[0.5, 1.0, 0.5, 0.5, 0.1]], np.float32)
    assert np.flatnonzero(filtered(weights, top_k=2)).tolist() == [0, 1, 2, 3]
    assert np.flatnonzero(filtered(weights, top_p=0.5)).tolist() == [0, 1, 2, 3]
    assert np.flatnonzero(filtered(weights, top_k=1)).tolist() == [1]


def test_top_p_is_a_share_of_what_top_k_leaves() -> None:
    weights = np.array([[1.0, 0.5, 0.4, 0.35, 0.3, 0.25]], np.float32)
    assert np.flatnonzero(filtered(weights, top_p=0.6)).tolist() == [0, 1, 2]
    assert np.flatnonzero(filtered(weights, top_k=2, top_p=0.6)).tolist() == [0]


def test_the_largest_weight_always_stays() -> None:
    weights = np.array([[0.2, 1.0, 0.3]], np.float32)
    for options in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        assert np.flatnonzero(filtered(weights, **options)).tolist() == [1]


def test_only_rows_that_need_ranking_are_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    ranked = []
    partition = np.partition

    def spy(array: np.ndarray, *args: int, **kwargs: int) -> np.ndarray:
        ranked.append(len(array))
        return partition(array, *args, **kwargs)

    monkeypatch.setattr(filters.np, "partition", spy)
    weights = np.random.default_rng(0).random((4, 30)).astype(np.float32)
    weights[:, 0] = 1
    apply_filters(
        weights, weights.astype(np.float64).sum(axis=1), np.array([0, 3, 0, 0]), np.ones(4), np.full(4, 0.1, np.float32)
    )
    assert ranked == [1]
