"""What the sampler returns for beams: the best tokens by scores, a score being a log-probability that rules changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.sampling.parameters import SamplingRows
from quire.sampling.plain_kernels import PlainKernels
from quire.sampling_params import SamplingParams
from tests.sampling.helpers import Case, beam, random_logits, sample

pytestmark = pytest.mark.usefixtures("kernel_set")


@pytest.mark.parametrize("num_candidates", [1, 5, 64, 80])
def test_the_best_log_probabilities(num_candidates: int) -> None:
    logits = random_logits(2, 203)
    result = sample(logits, [beam(num_candidates)] * 2)
    expected = torch.log_softmax(logits.double(), dim=1)
    for row in range(2):
        values, tokens = expected[row].topk(num_candidates)
        assert result.candidates[row].token_ids == tokens.tolist()
        np.testing.assert_allclose(result.candidates[row].scores, values.numpy(), atol=1e-5)
        assert result.token_ids[row] == tokens[0]
    assert result.logprobs == {}


def test_of_equal_tokens_the_lowest_come_first() -> None:
    logits = torch.zeros(2, 200)
    logits[:, 150] = 1.0
    for num_candidates in (4, 100):
        result = sample(logits, [beam(num_candidates)] * 2)
        assert result.candidates[1].token_ids == [150, *range(num_candidates - 1)]


def test_rules_change_log_probabilities_which_are_not_normalised_again() -> None:
    logits = random_logits(1, 50)
    logprobs = torch.log_softmax(logits.double(), dim=1)[0]
    order = logprobs.argsort(descending=True).tolist()
    case = beam(
        3, prompt=[order[1]], output=[order[2]], stop=[order[0]], min_tokens=2, repetition_penalty=2.0,
        logit_bias={order[5]: 100.0}, logprobs=2,
    )  # fmt: skip
    found = sample(logits, [case]).candidates[0]
    assert found.token_ids[:2] == [order[5], order[3]]
    assert found.scores[:2] == pytest.approx([float(logprobs[order[5]]) + 100, float(logprobs[order[3]])], abs=1e-4)
    assert order[0] not in found.token_ids
    penalised = sample(logits, [beam(50, prompt=[order[1]], repetition_penalty=2.0)]).candidates[0]
    at = penalised.token_ids.index(order[1])
    assert penalised.scores[at] == pytest.approx(2 * float(logprobs[order[1]]), abs=1e-4)


def test_more_candidates_than_tokens() -> None:
    logits = random_logits(1, 9)
    found = sample(logits, [beam(99)]).candidates[0]
    assert found.token_ids == logits[0].argsort(descending=True).tolist()


def test_forbidden_tokens_are_left_out_but_one_remains() -> None:
    logits = random_logits(2, 40)
    cases = [beam(5, allowed_token_ids=[7, 8]), beam(5, allowed_token_ids=[9], stop=[9], min_tokens=1)]
    result = sample(logits, cases)
    assert sorted(result.candidates[0].token_ids) == [7, 8]
    assert result.candidates[1].token_ids == [9]


def test_the_same_beside_other_rows() -> None:
    logits = random_logits(5, 500)
    cases = [
        Case(SamplingParams(temperature=0.9, top_p=0.8, logprobs=2)),
        beam(3),
        Case(SamplingParams(temperature=0.0, presence_penalty=1.0), output=[3]),
        beam(20, frequency_penalty=0.5, output=[4, 4, 5]),
        Case(SamplingParams(temperature=1.0, best_of=2)),
    ]
    together = sample(logits, cases, rows=[4, 2, 0, 1, 3])
    assert sorted(together.candidates) == [1, 3]
    assert sorted(together.logprobs) == [0, 4], "best_of needs them to compare"
    for index, case in enumerate(cases):
        alone = sample(logits[index : index + 1], [case])
        assert alone.token_ids[0] == together.token_ids[index]
        assert alone.candidates.get(0) == together.candidates.get(index)
        assert alone.logprobs.get(0) == together.logprobs.get(index)


def test_a_nonfinite_beam_has_no_candidates() -> None:
    logits = random_logits(3, 30)
    for value in (float("nan"), float("inf")):
        logits[1, 4] = value
        found = sample(logits, [beam(4)] * 3)
        assert found.nonfinite == (1,)
        assert sorted(found.candidates) == [0, 2]


def test_the_plain_ranking_is_a_stable_sort() -> None:
    generator = np.random.default_rng(0)
    scores = generator.integers(0, 6, (20, 90)).astype(np.float32)
    scores[scores == 0] = -np.inf
    for num_best in (1, 7, 89, 90, 200):
        expected = np.argsort(-scores, axis=1, kind="stable")[:, :num_best]
        assert (PlainKernels(SamplingRows(1))._best(scores, num_best) == expected).all()
