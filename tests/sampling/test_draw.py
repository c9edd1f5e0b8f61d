"""Drawing: the right distribution, never an impossible token, the same bits in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.sampling.draw import compute_weights, cumulative_blocks, draw
from quire.sampling_params import SamplingParams
from tests.long import all_but_long
from tests.sampling.helpers import Case, naive_probabilities, sample

pytestmark = pytest.mark.usefixtures("plain_and_native")

PARAMETERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    {"allowed_token_ids": [3, 5, 6], "logit_bias": {5: 2.0}},
]


def chi_square_statistic(counts: np.ndarray, probabilities: np.ndarray) -> tuple[float, int]:
    """Pool tokens that are expected fewer than five times; return the statistic and the degrees of freedom."""
    expected = probabilities * counts.sum()
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    if expected[-1] < 1e-9:
        assert observed[-1] == 0
        observed, expected = observed[:-1], expected[:-1]
    return float(((observed - expected) ** 2 / expected).sum()), len(observed) - 1


@pytest.mark.parametrize("options", PARAMETERS, ids=str)
@pytest.mark.parametrize("vocab_size", all_but_long([40, 131], [131]))
def test_tokens_follow_the_exact_distribution(options: dict, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(rng.normal(size=vocab_size).astype(np.float32) * 2)
    params = SamplingParams(**options)
    cases = [Case(params, prompt=[1, 2], output=[3, 3, 4], seed=seed) for seed in range(5000)]
    token_ids = sample(logits.expand(len(cases), -1), cases).token_ids
    probabilities = naive_probabilities(logits.numpy(), cases[0])
    counts = np.bincount(token_ids, minlength=vocab_size)
    assert counts[probabilities == 0].sum() == 0
    statistic, freedom = chi_square_statistic(counts, probabilities)
    # Wilson-Hilferty: the 0.9999 quantile of chi-square.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < limit


@pytest.mark.parametrize("vocab_size", [7, 64, 130, 5000])
def test_bitwise_the_same_alone_and_in_any_batch(vocab_size: int) -> None:
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(size=(33, vocab_size)).astype(np.float32) * 4)
    cases = [
        Case(
            SamplingParams(**[*PARAMETERS, {"temperature": 0}][i % 9], logprobs=4 if i % 3 == 0 else None),
            prompt=[1, 2],
            output=[3] * i,
            seed=i,
        )
        for i in range(33)
    ]
    alone = [sample(logits[i : i + 1], cases[i : i + 1]) for i in range(33)]
    for order in (list(range(33)), list(rng.permutation(33)), list(range(5, 22))):
        together = sample(logits[order], [cases[i] for i in order], rows=order, num_rows=40)
        assert together.token_ids == [int(alone[i].token_ids[0]) for i in order]
        for index, i in enumerate(order):
            assert together.logprobs.get(index) == alone[i].logprobs.get(0)


@pytest.mark.parametrize("vocab_size", [5, 64, 65, 1000])
def test_weights_and_sums_do_not_depend_on_the_batch(vocab_size: int) -> None:
    rng = np.random.default_rng(2)
    scores = rng.normal(size=(50, vocab_size)).astype(np.float32) * 5
    temperature = rng.uniform(0.1, 2, 50).astype(np.float32)
    weights = compute_weights(scores, temperature)
    cumulative = cumulative_blocks(weights)
    for start, stop in [(0, 1), (49, 50), (3, 20)]:
        part = compute_weights(scores[start:stop], temperature[start:stop])
        assert part.tobytes() == weights[start:stop].tobytes()
        assert cumulative_blocks(part).tobytes() == cumulative[start:stop].tobytes()


def test_ends_of_the_distribution() -> None:
    """The smallest and largest uniform number, with impossible tokens at both ends and whole impossible blocks."""
    weights = np.zeros((2, 320), np.float32)
    weights[:, [70, 71, 200]] = [0.3, 1.0, 1e-30]
    uniforms = np.array([2.0**-53, 1 - 2.0**-53])
    assert draw(weights, cumulative_blocks(weights), uniforms).tolist() == [70, 71]
    assert draw(weights, cumulative_blocks(weights), np.array([0.0, 1.0])).tolist() == [70, 71]


def test_no_impossible_token_over_many_draws() -> None:
    rng = np.random.default_rng(3)
    weights = np.zeros((4000, 256), np.float32)
    possible = rng.random((4000, 256)) < 0.02
    possible[:, 100] = True
    weights[possible] = rng.random(int(possible.sum())).astype(np.float32) ** 20
    weights[:, 100] = 1
    token_ids = draw(weights, cumulative_blocks(weights), rng.random(4000))
    assert (weights[np.arange(4000), token_ids] > 0).all()


def test_many_rows_of_a_large_vocabulary_are_drawn_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(17, 90, generator=torch.Generator().manual_seed(1))
    cases = [Case(SamplingParams(top_p=0.9 if seed % 2 else 1.0), seed=seed) for seed in range(17)]
    whole = sample(logits, cases).token_ids
    monkeypatch.setattr("quire.sampling.plain_kernels.SLICE_ELEMENTS", 200)
    assert sample(logits, cases).token_ids == whole
