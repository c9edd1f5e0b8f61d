"""Bias, penalties, bans and allowed tokens, against a reference that goes token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.sampling.parameters import SamplingRows
from quire.sampling.rules import BANNED_SCORE
from quire.sampling.sampler import Sampler
from quire.sampling_params import SamplingParams
from tests.sampling.helpers import Case, naive_scores, sample, sample_one

pytestmark = pytest.mark.usefixtures("plain_and_native")

VOCAB = 30


def random_case(rng: np.random.Generator) -> Case:
    def maybe(value: object, default: object) -> object:
        return value if rng.random() < 0.5 else default

    tokens = rng.integers(0, VOCAB, 40).tolist()
    params = SamplingParams(
        temperature=0,
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        logit_bias=maybe({int(t): float(rng.uniform(-5, 5)) for t in rng.integers(0, VOCAB, 5)}, None),
        allowed_token_ids=maybe(rng.choice(VOCAB, 12, replace=False).tolist(), None),
        min_tokens=maybe(int(rng.integers(0, 12)), 0),
    )
    output = tokens[20 : 20 + int(rng.integers(0, 20))]
    bad = [[int(token)] for token in rng.integers(0, VOCAB, 2)]
    for size in (1, 2, 3):
        bad.append([*output[len(output) - size :], int(rng.integers(0, VOCAB))])
    return Case(
        params,
        prompt=tokens[: int(rng.integers(1, 20))],
        output=output,
        stop=rng.integers(0, VOCAB, 3).tolist(),
        bad=maybe(bad, []),
    )


def test_scores_match_the_reference_in_a_mixed_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every feature on or off at random in each row; the scores themselves are compared."""
    rng = np.random.default_rng(0)
    seen: list[np.ndarray] = []
    edit = Sampler._edit

    def spy(self: Sampler, scores: np.ndarray, *args: object) -> None:
        edit(self, scores, *args)
        seen.append(scores.copy())

    monkeypatch.setattr(Sampler, "_edit", spy)
    for _ in range(30):
        cases = [random_case(rng) for _ in range(12)]
        logits = torch.from_numpy(rng.normal(size=(12, VOCAB)).astype(np.float32) * 3)
        rows = rng.permutation(20)[:12].tolist()
        token_ids = sample(logits, cases, rows=rows, num_rows=20).token_ids
        for index, case in enumerate(cases):
            expected = naive_scores(logits[index].numpy(), case)
            actual = seen[-1][index].astype(np.float64)
            actual[actual <= BANNED_SCORE] = -np.inf
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
            if np.isfinite(expected).any():
                assert token_ids[index] == expected.argmax()


def test_presence_and_frequency_look_at_the_output_only() -> None:
    logits = torch.tensor([2.0, 1.5, 0.0])
    params = SamplingParams(temperature=0, presence_penalty=1.0)
    assert sample_one(logits, Case(params, prompt=[0, 0])) == 0
    assert sample_one(logits, Case(params, prompt=[0], output=[0])) == 1


def test_frequency_counts_occurrences() -> None:
    logits = torch.tensor([2.0, 1.5, 0.0])
    params = SamplingParams(temperature=0, frequency_penalty=0.2)
    assert sample_one(logits, Case(params, prompt=[2], output=[0, 0])) == 0
    assert sample_one(logits, Case(params, prompt=[2], output=[0, 0, 0])) == 1


def test_repetition_looks_at_prompt_and_output() -> None:
    logits = torch.tensor([2.0, 1.5, -1.0])
    params = SamplingParams(temperature=0, repetition_penalty=1.5)
    assert sample_one(logits, Case(params, prompt=[0])) == 1
    assert sample_one(logits, Case(params, prompt=[2], output=[0])) == 1
    negative = torch.tensor([-1.0, -1.2, -3.0])
    assert sample_one(negative, Case(params, prompt=[0])) == 1


def test_stop_tokens_are_banned_until_min_tokens() -> None:
    logits = torch.tensor([0.0, 5.0, 4.0, 1.0])
    params = SamplingParams(temperature=0, min_tokens=2)
    assert sample_one(logits, Case(params, prompt=[0], output=[3], stop=[1, 2])) == 3
    assert sample_one(logits, Case(params, prompt=[0], output=[3, 3], stop=[1, 2])) == 1


def test_a_banned_sequence_must_be_complete_and_generated() -> None:
    logits = torch.tensor([0.0, 5.0, 4.0, 1.0])
    params = SamplingParams(temperature=0)
    bad = [[3, 2, 1]]
    assert sample_one(logits, Case(params, prompt=[0], output=[3, 2], bad=bad)) == 2
    assert sample_one(logits, Case(params, prompt=[0], output=[2, 2], bad=bad)) == 1
    assert sample_one(logits, Case(params, prompt=[3], output=[2], bad=bad)) == 1
    assert sample_one(logits, Case(params, prompt=[3, 2], bad=[[1]])) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_contradictory_rules_choose_among_the_allowed_tokens(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, allowed_token_ids=[2, 3], min_tokens=5)
    cases = [Case(params, prompt=[0], seed=seed, stop=[2, 3]) for seed in range(50)]
    chosen = set(sample(torch.randn(50, 9), cases).token_ids.tolist())
    assert chosen == ({2} if temperature == 0 else {2, 3})


def test_ties_take_the_lowest_token() -> None:
    logits = torch.tensor([0.0, 7.0, 7.0, 7.0])
    assert sample_one(logits, Case(SamplingParams(temperature=0))) == 1


def test_a_row_forgets_what_its_last_owner_wanted() -> None:
    rows = SamplingRows(2)
    everything = SamplingParams(logit_bias={1: 5.0}, allowed_token_ids=[1], min_tokens=3, seed=1)
    case = Case(everything, stop=[2], bad=[[1]])
    rows.set(0, case.sampling)
    rows.clear(0)
    rows.set(0, Case(SamplingParams(temperature=0)).sampling)
    rows.set(1, case.sampling)
    rows.set(1, Case(SamplingParams(temperature=0)).sampling)
    index_of_row = np.arange(2)
    for column in (rows.logit_bias, rows.stop_tokens):
        assert len(column.select(index_of_row)[0]) == 0
    assert rows.allowed_tokens.select(index_of_row) == []
    assert rows.used(np.arange(2)) == rows.features[0]
