"""The device's sampler against the host's: tokens, rules, log-probabilities, candidates, non-finite logits."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quire.sampling.errors import NonFiniteLogitsError
from quire.sampling.rules import BANNED_SCORE
from quire.sampling.sampler import SampledTokens
from quire.sampling_params import SamplingParams
from tests.sampling.device_helpers import LANES, NEVER, prepare, sample_on
from tests.sampling.helpers import Case, naive_scores, sample

VOCAB = 203
"""No multiple of any block."""


def random_logits(rows: int, size: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(rows)) * scale


def random_case(rng: np.random.Generator, **more: Any) -> Case:
    """Every rule on or off at random."""

    def maybe(value: object, default: object) -> object:
        return value if rng.random() < 0.5 else default

    tokens = rng.integers(0, VOCAB, 90).tolist()
    output = tokens[60 : 60 + int(rng.integers(0, 30))] * 2
    params = SamplingParams(
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        logit_bias=maybe({int(t): float(rng.uniform(-5, 5)) for t in rng.integers(0, VOCAB, 9)}, None),
        allowed_token_ids=maybe(rng.choice(VOCAB, 40, replace=False).tolist(), None),
        min_tokens=maybe(int(rng.integers(0, 60)), 0),
        max_tokens=100,
        **more,
    )
    bad = [[int(token)] for token in rng.integers(0, VOCAB, 3)]
    bad += [[*output[len(output) - size :], int(rng.integers(0, VOCAB))] for size in (1, 2, 5)]
    bad += [[*output[len(output) - 4 :], 1, int(rng.integers(0, VOCAB))]]
    stop = rng.integers(0, VOCAB, 4).tolist()
    prompt = tokens[: int(rng.integers(1, 60))]
    return Case(params, prompt=prompt, output=output, stop=stop, bad=maybe(bad, []), seed=int(rng.integers(2**62)))


def beam(num_candidates: int, **more: Any) -> Case:
    case = {name: more.pop(name) for name in ("prompt", "output", "stop") if name in more}
    made = Case(SamplingParams(use_beam_search=True, n=2, **more), **case)
    made.sampling = msgspec.structs.replace(made.sampling, num_candidates=num_candidates)
    return made


def assert_same(actual: SampledTokens, expected: SampledTokens) -> None:
    """Tokens and ranks are equal, log-probabilities and scores but for the last bits."""
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    assert sorted(actual.logprobs) == sorted(expected.logprobs)
    assert sorted(actual.candidates) == sorted(expected.candidates)
    for index, entry in expected.logprobs.items():
        assert actual.logprobs[index].token_ids == entry.token_ids
        assert actual.logprobs[index].rank == entry.rank
        assert actual.logprobs[index].logprobs == pytest.approx(entry.logprobs, abs=1e-5)
    for index, found in expected.candidates.items():
        assert actual.candidates[index].token_ids == found.token_ids
        assert actual.candidates[index].scores == pytest.approx(found.scores, rel=1e-5, abs=1e-5)


def test_scores_after_every_rule_match_the_reference(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rule on or off at random in each row; the scores themselves are compared."""
    rng = np.random.default_rng(0)
    for _ in range(2):
        cases = [random_case(rng, temperature=0) for _ in range(6)]
        logits = random_logits(6)
        made = prepare(cases, device, rows=[8, 2, 5, 0, 7, 1], num_rows=9)
        scores = logits.clone().to(device)
        made.sampler._edit(scores, made.batch, made.arena.rows.used(made.batch.rows_host))
        assert not made.sampler._counts.any(), "the table of counts is left empty"
        for index, case in enumerate(cases):
            actual = scores[index].cpu().numpy().astype(np.float64)
            actual[actual <= BANNED_SCORE] = -np.inf
            expected = naive_scores(logits[index].numpy(), case)
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_under_rules_are_those_of_the_host(device: torch.device, temperature: float) -> None:
    rng = np.random.default_rng(1)
    cases = [random_case(rng, temperature=temperature, logprobs=0 if n % 2 else None) for n in range(4)]
    logits = random_logits(4)
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
        assert actual.token_ids.tolist() == expected.token_ids.tolist()
        for index, entry in expected.logprobs.items():
            assert actual.logprobs[index].logprobs == pytest.approx(entry.logprobs, abs=1e-5)
            assert actual.logprobs[index].rank == entry.rank


def test_rows_that_want_different_things_do_not_disturb_each_other(device: torch.device) -> None:
    """Alone or together, in any order, in any row: bit by bit the same."""
    rng = np.random.default_rng(2)
    cases = [
        Case(SamplingParams(temperature=0), prompt=[1]),
        Case(SamplingParams(temperature=1.0, logprobs=0), prompt=[1, 2], output=[3], seed=5),
        Case(SamplingParams(temperature=0.7, top_p=0.9), prompt=[4], output=[5, 6], seed=6),
        Case(SamplingParams(temperature=1.5, top_k=20, min_p=0.02, presence_penalty=1.0), output=[7, 7], seed=7),
        Case(SamplingParams(temperature=0, allowed_token_ids=[9, 11, 150]), prompt=[9]),
        beam(3, prompt=[1], output=[8], frequency_penalty=0.5),
        random_case(rng, temperature=0.9, top_k=150),
    ]
    logits = random_logits(len(cases))
    alone = [sample_on(device, logits[i : i + 1], cases[i : i + 1]) for i in range(len(cases))]
    for order in ([6, 5, 4, 3, 2, 1, 0], [2, 0, 1]):
        together = sample_on(device, logits[order], [cases[i] for i in order], rows=order, num_rows=11)
        assert together.token_ids.tolist() == [int(alone[i].token_ids[0]) for i in order]
        for index, i in enumerate(order):
            assert together.logprobs.get(index) == alone[i].logprobs.get(0)
            assert together.candidates.get(index) == alone[i].candidates.get(0)


def test_ties_take_the_lowest_token(device: torch.device) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [63, 64, 200]] = 7.0
    logits[1, [VOCAB - 1, 130]] = -0.0
    greedy = Case(SamplingParams(temperature=0))
    assert sample_on(device, logits, [greedy] * 2).token_ids.tolist() == [63, 0]


def test_log_probabilities_are_those_of_the_model(device: torch.device) -> None:
    """Whatever sampling does, for rows that ask, as many as they ask for."""
    logits = random_logits(4)
    bend = {"presence_penalty": 2.0, "logit_bias": {7: 90.0}, "allowed_token_ids": [7, 8]}
    cases = [
        Case(SamplingParams(temperature=0.3, top_k=3, logprobs=5, **bend), prompt=[1], output=[7, 7]),
        Case(SamplingParams(temperature=1.0), seed=3),
        Case(SamplingParams(temperature=1.0, logprobs=0, n=1, best_of=2), seed=4),
        Case(SamplingParams(temperature=0, logprobs=20)),
    ]
    actual = sample_on(device, logits, cases)
    assert_same(actual, sample(logits, cases))
    assert [len(actual.logprobs[index].token_ids) for index in (0, 2, 3)] == [6, 1, 21]


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


def test_candidates_of_beams(device: torch.device) -> None:
    logits = random_logits(3)
    cases = [
        beam(7),
        beam(3, prompt=[1, 2], output=[5, 6], stop=[7, 8], min_tokens=4, repetition_penalty=2.0, logit_bias={5: 9.0}),
        beam(5, allowed_token_ids=[9, 10], stop=[9], min_tokens=1),
    ]
    assert_same(sample_on(device, logits, cases), sample(logits, cases))


def test_more_candidates_than_tokens(device: torch.device) -> None:
    logits = random_logits(1, 9)
    assert_same(sample_on(device, logits, [beam(99)]), sample(logits, [beam(99)]))


@pytest.mark.parametrize(
    ("value", "options"),
    [
        (math.nan, {"temperature": 0}),
        (math.inf, {"temperature": 0}),
        (math.nan, {"logit_bias": {1: 1.0}}),
        (math.nan, {"top_k": 3, "logprobs": 0}),
        (math.inf, {"top_p": 0.5}),
    ],
    ids=str,
)
def test_nonfinite_logits_name_their_rows(device: torch.device, value: float, options: dict) -> None:
    logits = random_logits(6, 130)
    logits[2, 77] = value
    logits[4] = -math.inf
    logits[5, 0] = value
    cases = [Case(SamplingParams(**options), seed=i) for i in range(6)]
    made = prepare(cases, device)
    samples = made.sampler.sample(logits.to(device), made.batch)
    found = samples.assemble([tensor.cpu() for tensor in samples.tensors()])
    assert found.nonfinite == (2, 4, 5)
    assert sorted(found.logprobs) == ([0, 1, 3] if "logprobs" in options else [])
    written = made.batch.token_table[:, 0].tolist()
    assert [written[row] for row in (2, 4, 5)] == [0, 0, 0], "a nonfinite row still gets a token that exists"
    assert NEVER not in written


def test_nonfinite_logits_that_rules_hide_are_found_by_log_probabilities(device: torch.device) -> None:
    logits = random_logits(3)
    logits[1, 9] = math.nan
    cases = [
        Case(SamplingParams(temperature=0)),
        Case(SamplingParams(temperature=0, allowed_token_ids=[3, 4])),
        Case(SamplingParams(temperature=0, logprobs=1, allowed_token_ids=[3, 4])),
    ]
    assert sample_on(device, logits, cases).token_ids[1] in (3, 4)
    cases[1] = cases[2]
    for run in (lambda: sample_on(device, logits, cases), lambda: sample(logits, cases)):
        found = run()
        assert found.nonfinite == (1,)
        assert sorted(found.logprobs) == [2]


def test_a_row_forgets_what_its_last_owner_wanted(device: torch.device) -> None:
    logits = random_logits(1)
    everything = Case(
        SamplingParams(
            temperature=1.0, top_k=1, logit_bias={1: 50.0}, allowed_token_ids=[1, 2], min_tokens=3, prompt_logprobs=1
        ),
        stop=[2],
        bad=[[4]],
    )
    plain = Case(SamplingParams(temperature=0))
    made = prepare([everything], device)
    rows = made.arena.rows
    assert made.sampler.sample(logits.clone().to(device), made.batch).token_ids.tolist() == [1]
    assert rows.rows_with_prompt_logprobs == {0}
    rows.clear(0)
    assert rows.rows_with_prompt_logprobs == set()
    rows.set(0, plain.sampling, made.arena)
    assert made.sampler.sample(logits.clone().to(device), made.batch).token_ids.tolist() == [int(logits.argmax())]
    # Another row of the batch has lists: this one has none.
    listed = prepare([plain, everything], device)
    listed.arena.rows.set(0, everything.sampling, listed.arena)
    listed.sampler.sample(logits.expand(2, -1).clone().to(device), listed.batch)
    listed.arena.rows.set(0, plain.sampling, listed.arena)
    tokens = listed.sampler.sample(logits.expand(2, -1).clone().to(device), listed.batch).token_ids.tolist()
    assert tokens == [int(logits.argmax()), 1]


def test_log_probabilities_of_given_tokens(device: torch.device) -> None:
    """What prompts are scored with."""
    logits = random_logits(4).bfloat16()
    made = prepare([Case(SamplingParams())], device)
    targets = torch.tensor([7, 9, 0, 3, 202, 1], dtype=torch.int32, device=device)[1:5]
    for num_top in (0, 3):
        scored = made.sampler.logprobs(logits.to(device), targets, num_top)
        entries = scored.assemble([tensor.cpu() for tensor in scored.tensors()])
        expected = torch.log_softmax(logits.double(), dim=1)
        for row, (entry, target) in enumerate(zip(entries, [9, 0, 3, 202], strict=True)):
            order = sorted(range(VOCAB), key=lambda token, row=row: (-float(logits[row, token]), token))
            assert entry.token_ids == [target, *order[:num_top]]
            assert entry.logprobs == pytest.approx([float(expected[row, token]) for token in entry.token_ids], abs=1e-5)
            assert entry.rank == 1 + int((logits[row] > logits[row, target]).sum())
    logits[2, 5] = math.nan
    logits[0, 9] = -math.inf
    nonfinite = made.sampler.logprobs(logits.to(device), targets, 1)
    with pytest.raises(NonFiniteLogitsError) as caught:
        nonfinite.assemble([tensor.cpu() for tensor in nonfinite.tensors()])
    assert caught.value.indices == (0, 2)
