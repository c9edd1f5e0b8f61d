"""The device's sampler against the host's: tokens under rules, types of logits, the order of equal logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from quire.sampling.results import SampledTokens
from quire.sampling_params import SamplingParams
from tests.sampling.device_helpers import LANES, Device, sample_on
from tests.sampling.helpers import Case, Prepared, random_case, random_logits, sample

VOCAB = 203
"""No multiple of any block."""


def assert_same(actual: SampledTokens, expected: SampledTokens) -> None:
    """Tokens and ranks are equal, log-probabilities and scores but for the last bits."""
    assert actual.token_ids == expected.token_ids
    assert sorted(actual.logprobs) == sorted(expected.logprobs)
    assert sorted(actual.candidates) == sorted(expected.candidates)
    for index, entry in expected.logprobs.items():
        assert actual.logprobs[index].token_ids == entry.token_ids
        assert actual.logprobs[index].rank == entry.rank
        assert actual.logprobs[index].logprobs == pytest.approx(entry.logprobs, abs=1e-5)
    for index, found in expected.candidates.items():
        assert actual.candidates[index].token_ids == found.token_ids
        assert actual.candidates[index].scores == pytest.approx(found.scores, rel=1e-5, abs=1e-5)


def test_counting_for_penalties_leaves_the_table_of_counts_empty(device: torch.device) -> None:
    params = SamplingParams(temperature=0, frequency_penalty=0.5, repetition_penalty=1.2)
    made = Prepared([Case(params, prompt=[1, 2], output=[3, 3])] * 3, platform=Device(device))
    made.edited(random_logits(3, VOCAB))
    assert made.kernels._counts.shape == (3, VOCAB)
    assert not made.kernels._counts.any()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_under_rules_are_those_of_the_host(device: torch.device, temperature: float) -> None:
    rng = np.random.default_rng(1)
    cases = [random_case(rng, VOCAB, temperature=temperature, logprobs=0 if n % 2 else None) for n in range(4)]
    logits = random_logits(4, VOCAB)
    rows = [7, 3, 0, 9]
    assert_same(sample_on(device, logits, cases, rows=rows), sample(logits, cases, rows=rows))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab_size", [1, 64, 130])
def test_each_type_of_logits(device: torch.device, dtype: torch.dtype, vocab_size: int) -> None:
    """Logits of 16 bits have many equal ones; rules change them in float32."""
    logits = random_logits(4, vocab_size, scale=1.0).to(dtype)
    history = {"prompt": [0], "output": [vocab_size - 1] * 2}
    cases = [
        Case(SamplingParams(temperature=0), **history),
        Case(SamplingParams(temperature=0.9, seed=1), seed=11, **history),
        Case(SamplingParams(temperature=0, frequency_penalty=0.3, logprobs=0), **history),
        Case(SamplingParams(temperature=1.1, top_k=5, logit_bias={0: 1.5}), seed=12, **history),
    ]
    for some in (cases[:2], cases):
        actual, expected = sample_on(device, logits[: len(some)], some), sample(logits[: len(some)].float(), some)
        assert actual.token_ids == expected.token_ids
        for index, entry in expected.logprobs.items():
            assert actual.logprobs[index].logprobs == pytest.approx(entry.logprobs, abs=1e-5)
            assert actual.logprobs[index].rank == entry.rank


@pytest.mark.parametrize("num_rows", [2, 3, 7])
def test_rows_that_share_a_list_of_allowed_tokens_keep_their_own_scores(device: torch.device, num_rows: int) -> None:
    """The sequences of a request with n > 1, or prompts with one SamplingParams, have one list; others lie between."""
    shared = SamplingParams(temperature=0, allowed_token_ids=[*range(3, 190, 2)])
    shorter = SamplingParams(temperature=0, allowed_token_ids=[8, 20, 60])
    free = SamplingParams(temperature=0)
    cases = [Case(params) for params in (shorter, *[shared] * num_rows, free, shorter)]
    logits = random_logits(len(cases), VOCAB)
    expected = sample(logits, cases).token_ids
    assert sample_on(device, logits, cases).token_ids == expected
    assert len(set(expected[1 : 1 + num_rows])) > 1, "rows of different scores"
    made = Prepared(cases, platform=Device(device))
    assert np.array_equal(made.edited(logits), Prepared(cases).edited(logits)), "each its own scores"


def test_equal_logits_are_ranked_by_their_tokens(device: torch.device) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 150] = 1.0
    logits[0, :100] = -math.inf
    entry = sample_on(device, logits, [Case(SamplingParams(temperature=0, logprobs=9))]).logprobs[0]
    assert entry.token_ids == [150, 150, *range(100, 108)]
    assert entry.rank == 1
    lane = torch.zeros(1, VOCAB)
    lane[0, 5::LANES] = 2.0
    entry = sample_on(device, lane, [Case(SamplingParams(temperature=0, logprobs=6))]).logprobs[0]
    assert entry.token_ids == [5, 5, 69, 133, 197, 0, 1]
    few = torch.full((1, VOCAB), -math.inf)
    few[0, [5, 180]] = 0.0
    entry = sample_on(device, few, [Case(SamplingParams(temperature=0, logprobs=4))]).logprobs[0]
    assert entry.token_ids == [5, 5, 180, 0, 1]
    assert entry.logprobs == pytest.approx([-math.log(2)] * 3 + [-math.inf] * 2)
