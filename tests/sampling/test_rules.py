"""Bias, penalties, bans and allowed tokens: what each of them looks at."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.sampling.parameters import SamplingRows
from quire.sampling_params import SamplingParams
from tests.sampling.helpers import Case, sample, sample_one

pytestmark = pytest.mark.usefixtures("plain_and_native")


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
    chosen = set(sample(torch.randn(50, 9), cases).token_ids)
    assert chosen == ({2} if temperature == 0 else {2, 3})


def num_entries(rows: SamplingRows, kind: int) -> int:
    return sum(len(entries.tokens) for entries in rows.lists.select(kind, np.arange(2)))


def test_a_row_forgets_what_its_last_owner_wanted() -> None:
    rows = SamplingRows(2)
    everything = SamplingParams(logit_bias={1: 5.0}, allowed_token_ids=[1], min_tokens=3, seed=1)
    case = Case(everything, stop=[2], bad=[[1]])
    rows.set(0, case.sampling)
    rows.clear(0)
    rows.set(0, Case(SamplingParams(temperature=0)).sampling)
    rows.set(1, case.sampling)
    assert [num_entries(rows, kind) for kind in range(4)] == [1, 1, 1, 1]
    rows.set(1, Case(SamplingParams(temperature=0)).sampling)
    assert [num_entries(rows, kind) for kind in range(4)] == [0, 0, 0, 0]
    assert rows.used(np.arange(2)) == rows.features[0]
