"""What log-probabilities are of, by every set of kernels, against a float64 twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.sampling.batch import TokenMasks
from quire.sampling_params import SamplingParams
from tests.sampling.helpers import (
    Case,
    Prepared,
    naive_probabilities,
    naive_scores,
    random_case,
    random_logits,
)

pytestmark = pytest.mark.usefixtures("kernel_set")
MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
VOCAB = 203
"""No multiple of any block."""


def twin(logits: np.ndarray, case: Case, mode: str) -> np.ndarray:
    """[vocab_size] float64: what a row reports in a mode."""
    values = logits.astype(np.float64)
    if mode.startswith("processed"):
        values, temperature = naive_scores(logits, case), case.sampling.params.temperature
        if temperature > 0:
            values = np.where(naive_probabilities(logits, case) > 0, values / temperature, -np.inf)
    if mode.endswith("logprobs"):
        values = values - (values.max() + np.log(np.exp(values - values.max()).sum()))
    return values


def check(entry_tokens: list[int], values: list[float], rank: int, expected: np.ndarray) -> None:
    np.testing.assert_allclose(values, expected[entry_tokens], rtol=1e-5, atol=2e-5)
    assert values[1:] == sorted(values[1:], reverse=True)
    assert rank == (expected > expected[entry_tokens[0]] + 1e-4).sum() + 1
    assert np.isfinite(values[0])


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_reports_what_its_name_says(mode: str, kernel_set: str) -> None:
    """Rules, temperature and filters at random, greedy rows and drawn ones beside another; few alternatives, and more
    than the filters keep."""
    rng = np.random.default_rng(7)
    for _ in range(1 if kernel_set == "triton" else 8):
        cases = [
            Case(SamplingParams(temperature=1.0), seed=4),
            Case(SamplingParams(temperature=0, logit_bias={9: 3.0}, logprobs=5)),
            Case(SamplingParams(temperature=0.9, top_k=8, top_p=0.9, min_p=0.01, logprobs=12), seed=3),
        ]
        # Triton's interpreter takes seconds for each filter and most rules.
        if kernel_set == "triton":
            cases = cases if mode == "processed_logprobs" else cases[:2]
        else:
            cases += [
                random_case(rng, VOCAB, temperature=0, logprobs=5),
                random_case(rng, VOCAB, temperature=0.6, logprobs=3),
                random_case(rng, VOCAB, temperature=1.7, top_p=0.8, logprobs=4),
                random_case(rng, VOCAB, temperature=0.8, top_k=6, min_p=0.01, logprobs=40),
            ]
        logits = random_logits(len(cases), VOCAB)
        sampled = Prepared(cases, rows=list(range(len(cases)))[::-1], mode=mode).sample(logits)
        assert sorted(sampled.logprobs) == list(range(1, len(cases)))
        for index, entry in sampled.logprobs.items():
            assert len(entry.token_ids) == 1 + (cases[index].sampling.params.logprobs or 0)
            expected = twin(logits[index].numpy(), cases[index], mode)
            if np.isfinite(expected).any():
                check(entry.token_ids, entry.logprobs, entry.rank, expected)
        # A row's report depends on the row alone, bit by bit, and the tokens are those of every other mode.
        alone = Prepared(cases[1:2], mode=mode).sample(logits[1:2])
        assert alone.logprobs[0] == sampled.logprobs[1]
        if kernel_set != "triton":
            assert Prepared(cases).sample(logits).token_ids == sampled.token_ids


@pytest.mark.parametrize("mode", MODES)
def test_tokens_that_rows_name_and_tokens_that_masks_leave(mode: str) -> None:
    """As structured outputs mask them: what is not allowed is impossible where the report is processed."""
    case = Case(SamplingParams(temperature=0.5, logprobs=2, logprob_token_ids=[7, 90, 41]), seed=8)
    allowed = [7, 41, 100]
    words = np.zeros((1, -(-VOCAB // 32)), np.uint32)
    for token in allowed:
        words[0, token // 32] |= np.uint32(1 << token % 32)
    logits = random_logits(2, VOCAB)
    sampled = Prepared([case, case], mode=mode).sample(logits, TokenMasks(np.array([1]), words))
    for index, masked in ((0, False), (1, True)):
        entry, row = sampled.logprobs[index], logits[index].numpy().copy()
        assert entry.token_ids[0] in (allowed if masked else range(VOCAB))
        if masked and mode.startswith("processed"):
            row[[token for token in range(VOCAB) if token not in allowed]] = -np.inf
        with np.errstate(invalid="ignore"):
            expected = twin(row, case, mode)
        assert entry.token_ids[-3:] == [7, 90, 41]
        np.testing.assert_allclose(entry.logprobs, expected[entry.token_ids], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("mode", MODES)
def test_prompt_tokens_are_reported_as_the_model_has_them(mode: str) -> None:
    logits = random_logits(3, VOCAB)
    targets = [5, 0, 202]
    case = Case(SamplingParams(temperature=0.3, top_k=2, logit_bias={5: 50.0}))
    entries = Prepared([case], mode=mode).logprobs(logits, targets, 3)()
    for row, target, entry in zip(logits.numpy(), targets, entries, strict=True):
        assert entry.token_ids[0] == target
        check(entry.token_ids, entry.logprobs, entry.rank, twin(row, case, mode.replace("processed", "raw")))


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_are_not_sound_and_rows_whose_rules_contradict(mode: str) -> None:
    contradiction = SamplingParams(temperature=0.7, allowed_token_ids=[4], logprobs=1, min_tokens=1)
    cases = [Case(contradiction, stop=[4]), Case(SamplingParams(temperature=0.7, logprobs=1), seed=1)]
    logits = random_logits(2, VOCAB)
    sampled = Prepared(cases, mode=mode).sample(logits)
    assert (int(sampled.token_ids[0]), list(sampled.nonfinite)) == (4, [])
    logits[1, 9] = torch.nan
    sampled = Prepared(cases, mode=mode).sample(logits)
    assert (list(sampled.nonfinite), sorted(sampled.logprobs)) == ([1], [0])
