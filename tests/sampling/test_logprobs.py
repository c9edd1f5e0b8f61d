"""Log-probabilities of the raw logits; non-finite logits are errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from quire.sampling_params import SamplingParams
from tests.sampling.helpers import Case, sample


@pytest.mark.usefixtures("kernel_set")
def test_raw_whatever_the_sampling_does() -> None:
    logits = torch.randn(2, 60, generator=torch.Generator().manual_seed(0)) * 3
    params = SamplingParams(
        temperature=0.3, top_k=3, logprobs=5, presence_penalty=2.0, logit_bias={7: 90.0}, allowed_token_ids=[7, 8]
    )
    result = sample(logits, [Case(params, prompt=[1], output=[7, 7])] * 2, rows=[1, 0])
    expected = torch.log_softmax(logits.double(), dim=1)
    for index in range(2):
        entry, token = result.logprobs[index], int(result.token_ids[index])
        assert token in (7, 8)
        order = expected[index].argsort(descending=True)
        assert entry.token_ids == [token, *order[:5].tolist()]
        np.testing.assert_allclose(entry.logprobs, expected[index][entry.token_ids].numpy(), atol=1e-5)
        assert entry.rank == order.tolist().index(token) + 1


@pytest.mark.usefixtures("kernel_set")
def test_only_rows_that_ask_get_them_and_only_as_many() -> None:
    logits = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
    counts = [None, 0, 3, None, 20]
    cases = [Case(SamplingParams(temperature=i % 2, logprobs=count), seed=i) for i, count in enumerate(counts)]
    result = sample(logits, cases)
    assert sorted(result.logprobs) == [1, 2, 4]
    assert [len(result.logprobs[i].token_ids) for i in (1, 2, 4)] == [1, 4, 13]
    for index, entry in result.logprobs.items():
        assert entry.token_ids[0] == result.token_ids[index]
        assert entry.logprobs[1:] == sorted(entry.logprobs[1:], reverse=True)


@pytest.mark.usefixtures("kernel_set")
def test_tokens_that_rows_name() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(4)) * 3
    logits[3, 9] = -math.inf
    lists = [None, [7], [], [9, 30, 9, 2], [0]]
    counts = [2, None, 1, 3, None]
    cases = [
        Case(SamplingParams(temperature=0, logprobs=count, logprob_token_ids=listed, logit_bias={1: 50.0}), seed=index)
        for index, (listed, count) in enumerate(zip(lists, counts, strict=True))
    ]
    result = sample(logits, cases, rows=[4, 0, 2, 3, 1])
    expected = torch.log_softmax(logits.double(), dim=1)
    assert sorted(result.logprobs) == [0, 1, 2, 3, 4]
    for index, entry in result.logprobs.items():
        named = list(dict.fromkeys(lists[index] or []))
        assert entry.token_ids[0] == 1
        assert (entry.token_ids[len(entry.token_ids) - len(named) :], entry.num_listed) == (named, len(named))
        assert len(entry.token_ids) == 1 + (counts[index] or 0) + len(named)
        np.testing.assert_allclose(entry.logprobs, expected[index][entry.token_ids].numpy(), atol=1e-5)
        assert sample(logits[index : index + 1], [cases[index]]).logprobs[0] == entry


@pytest.mark.usefixtures("plain_and_native")
def test_equal_logits_come_in_the_same_order_whatever_others_ask_for() -> None:
    logits = torch.zeros(1, 200)
    cases = [Case(SamplingParams(temperature=0, logprobs=count, logit_bias={3: 1.0})) for count in (2, 20, 7)]
    alone = sample(logits, cases[:1]).logprobs[0]
    together = sample(logits.expand(3, -1), cases).logprobs[0]
    assert alone == together
    assert alone.rank == 1
    assert alone.logprobs[0] == pytest.approx(-math.log(200))


DAMAGE = [math.nan, math.inf]


@pytest.mark.usefixtures("plain_and_native")
@pytest.mark.parametrize("value", DAMAGE)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"logprobs": 1}, {"logit_bias": {1: 1.0}}], ids=str)
def test_nonfinite_logits_name_their_rows(value: float, temperature: float, options: dict) -> None:
    if temperature == 0:
        options = {name: setting for name, setting in options.items() if name != "top_p"}
    logits = torch.randn(6, 130, generator=torch.Generator().manual_seed(2))
    logits[2, 77] = value
    logits[5, 0] = value
    cases = [Case(SamplingParams(temperature=temperature, **options), seed=i) for i in range(6)]
    found = sample(logits, cases)
    assert found.nonfinite == (2, 5)
    sound = [0, 1, 3, 4]
    alone = sample(logits[sound], [cases[index] for index in sound])
    assert alone.token_ids == [found.token_ids[index] for index in sound]
    assert list(alone.logprobs.values()) == [entry for _, entry in sorted(found.logprobs.items())]


@pytest.mark.usefixtures("plain_and_native")
def test_nonfinite_logits_in_a_batch_of_greedy_and_random_rows() -> None:
    for row in range(4):
        logits = torch.randn(4, 10)
        logits[row] = math.nan
        cases = [Case(SamplingParams(temperature=i % 2), seed=i) for i in range(4)]
        assert sample(logits, cases).nonfinite == (row,)


@pytest.mark.usefixtures("plain_and_native")
def test_all_minus_infinity_is_nonfinite_too() -> None:
    for temperature in (0.0, 1.0):
        found = sample(torch.full((1, 8), -math.inf), [Case(SamplingParams(temperature=temperature))])
        assert found.nonfinite == (0,)
