"""Masks of a step, on every set of kernels: what they forbid is impossible, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

from quire.sampling.batch import TokenMasks
from quire.sampling.results import SampledTokens
from quire.sampling_params import SamplingParams
from tests.sampling.helpers import Case, Prepared, random_logits, sample

pytestmark = pytest.mark.usefixtures("kernel_set")
VOCAB = 203
"""No multiple of any block, nor of a word."""

CASES = [
    Case(SamplingParams(temperature=0), prompt=[1]),
    Case(SamplingParams(temperature=0, logprobs=2, repetition_penalty=1.3), prompt=[1, 2], output=[3]),
    Case(SamplingParams(temperature=0.9), prompt=[4], output=[5, 6], seed=6),
    Case(SamplingParams(temperature=1.5, top_k=20, top_p=0.9, logprobs=1), output=[7, 7], seed=7),
    Case(SamplingParams(temperature=0, allowed_token_ids=[9, 11, 150]), prompt=[9]),
]


def masks_of(allowed: dict[int, list[int]]) -> TokenMasks:
    bits = np.zeros((len(allowed), -(-VOCAB // 32) * 32), np.uint8)
    for place, tokens in enumerate(allowed.values()):
        bits[place, tokens] = 1
    return TokenMasks(np.array(list(allowed), np.int64), np.packbits(bits, axis=1, bitorder="little").view(np.uint32))


def sample_masked(made: Prepared, logits: object, allowed: dict[int, list[int]]) -> SampledTokens:
    samples = made.sampler.sample(made.platform.logits(logits), made.batch, masks_of(allowed))  # type: ignore[arg-type]
    return samples.assemble([tensor.cpu() for tensor in samples.tensors()])


def test_only_allowed_tokens_are_chosen_and_other_rows_are_unchanged() -> None:
    logits = random_logits(len(CASES), VOCAB)
    free = sample(logits, CASES)
    for masked in ([1, 3], [0, 2, 4]):
        allowed = {index: [3, 31, 32, 64, 150, 199, 202] for index in masked}
        found = sample_masked(Prepared(CASES), logits, allowed)
        assert not found.nonfinite
        for index in range(len(CASES)):
            if index in allowed:
                assert found.token_ids[index] in allowed[index]
            else:
                assert found.token_ids[index] == free.token_ids[index]
                assert found.logprobs.get(index) == free.logprobs.get(index)
        if 4 in allowed:
            assert found.token_ids[4] == 150, "the only one in the request's list and in the mask"
    best = logits[0, [3, 31, 32, 64, 150, 199, 202]].argmax()
    assert (
        sample_masked(Prepared(CASES), logits, {0: [3, 31, 32, 64, 150, 199, 202]}).token_ids[0]
        == ([3, 31, 32, 64, 150, 199, 202][int(best)])
    )


def test_a_mask_that_allows_everything_changes_nothing() -> None:
    logits = random_logits(len(CASES), VOCAB)
    free = sample(logits, CASES)
    found = sample_masked(Prepared(CASES), logits, {index: list(range(VOCAB)) for index in range(len(CASES))})
    assert found.token_ids == free.token_ids
    assert found.logprobs == free.logprobs


@pytest.mark.parametrize("token", [0, 31, 32, 202])
def test_one_token_is_left(token: int) -> None:
    logits = random_logits(4, VOCAB)
    found = sample_masked(Prepared(CASES[:4]), logits, {index: [token] for index in range(4)})
    assert found.token_ids == [token] * 4


def test_log_probabilities_are_the_models_own() -> None:
    logits = random_logits(2, VOCAB)
    case = Case(SamplingParams(temperature=0, logprobs=2), prompt=[1])
    free = sample(logits, [case, case])
    least = int(logits[1].argmin())
    found = sample_masked(Prepared([case, case]), logits, {1: [least]})
    assert found.logprobs[1].token_ids[1:] == free.logprobs[1].token_ids[1:]
    assert found.logprobs[1].rank == VOCAB
