"""What every set of kernels does: rules, draws, ties, log-probabilities, non-finite logits, rows beside other rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from quire.sampling.errors import NonFiniteLogitsError
from quire.sampling.rules import BANNED_SCORE
from quire.sampling_params import SamplingParams
from tests.sampling.helpers import Case, Host, Prepared, beam, naive_scores, random_case, random_logits, sample

pytestmark = pytest.mark.usefixtures("kernel_set")
VOCAB = 203
"""No multiple of any block."""


def test_scores_after_every_rule_match_the_reference(kernel_set: str) -> None:
    """Every rule on or off at random in each row; the scores themselves are compared, and the tokens."""
    rng = np.random.default_rng(0)
    for _ in range(2 if kernel_set == "triton" else 30):
        cases = [random_case(rng, VOCAB, temperature=0) for _ in range(6)]
        logits = random_logits(6, VOCAB)
        made = Prepared(cases, rows=rng.permutation(20)[:6].tolist(), num_rows=20)
        scores = made.edited(logits)
        scores[scores <= BANNED_SCORE] = -np.inf
        token_ids = made.sample(logits).token_ids
        for index, case in enumerate(cases):
            expected = naive_scores(logits[index].numpy(), case)
            np.testing.assert_allclose(scores[index], expected, rtol=1e-5, atol=1e-5)
            if np.isfinite(expected).any():
                assert token_ids[index] == expected.argmax()


def test_rows_that_want_different_things_do_not_disturb_each_other() -> None:
    """Alone or together, in any order, in any row: bit by bit the same."""
    rng = np.random.default_rng(2)
    cases = [
        Case(SamplingParams(temperature=0), prompt=[1]),
        Case(SamplingParams(temperature=1.0, logprobs=0), prompt=[1, 2], output=[3], seed=5),
        Case(SamplingParams(temperature=0.7, top_p=0.9), prompt=[4], output=[5, 6], seed=6),
        Case(SamplingParams(temperature=1.5, top_k=20, min_p=0.02, presence_penalty=1.0), output=[7, 7], seed=7),
        Case(SamplingParams(temperature=0, allowed_token_ids=[9, 11, 150]), prompt=[9]),
        beam(3, prompt=[1], output=[8], frequency_penalty=0.5),
        random_case(rng, VOCAB, temperature=0.9, top_k=150),
    ]
    logits = random_logits(len(cases), VOCAB)
    alone = [sample(logits[i : i + 1], cases[i : i + 1]) for i in range(len(cases))]
    for order in ([6, 5, 4, 3, 2, 1, 0], [2, 0, 1]):
        together = sample(logits[order], [cases[i] for i in order], rows=order, num_rows=11)
        assert together.token_ids == [int(alone[i].token_ids[0]) for i in order]
        for index, i in enumerate(order):
            assert together.logprobs.get(index) == alone[i].logprobs.get(0)
            assert together.candidates.get(index) == alone[i].candidates.get(0)


def test_several_rows_of_logits_for_one_sequence() -> None:
    """A row of the table may stand in a batch more than once, at positions of its own."""
    params = SamplingParams(temperature=0.9, logit_bias={3: 1.0}, min_tokens=3, presence_penalty=0.5, logprobs=1)
    tokens = [5, 6, 7]
    cases = [Case(params, prompt=[1], output=tokens[:count], stop=[9], bad=[[5, 6]], seed=4) for count in range(3)]
    logits = random_logits(3, VOCAB)
    alone = [sample(logits[i : i + 1], [cases[i]]) for i in range(3)]
    made = Prepared([cases[2], cases[1], cases[0]], rows=[0, 0, 0])
    table = np.array([[1, *tokens[:2], 0, 0, 0]], np.int32)
    made.batch = made.batch._replace(token_table=made.platform.array(table))
    samples = made.sampler.sample(made.platform.logits(logits.flip(0)), made.batch)
    together = samples.assemble([tensor.cpu() for tensor in samples.tensors()])
    assert together.token_ids == [int(alone[i].token_ids[0]) for i in (2, 1, 0)]
    assert [together.logprobs[index] for index in range(3)] == [alone[i].logprobs[0] for i in (2, 1, 0)]


def test_ties_take_the_lowest_token() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [63, 64, 200]] = 7.0
    logits[1, [VOCAB - 1, 130]] = -0.0
    greedy = Case(SamplingParams(temperature=0))
    assert sample(logits, [greedy] * 2).token_ids == [63, 0]


def test_the_number_depends_on_seed_and_index_alone() -> None:
    logits = torch.zeros(1, 200)
    cases = [Case(SamplingParams(), prompt=[1] * n, output=[5, 6], seed=3) for n in (1, 4)]
    cases += [Case(SamplingParams(), prompt=[1], output=[5] * n, seed=3) for n in range(6)]
    tokens = sample(logits.expand(len(cases), -1), cases).token_ids
    assert tokens[0] == tokens[1] == tokens[4]
    assert len(set(tokens[2:])) > 4


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6, 100.0])
def test_ends_of_the_temperatures(temperature: float) -> None:
    logits = torch.randn(4, 90, generator=torch.Generator().manual_seed(0)) * 10
    logits[3] = -np.inf
    logits[3, [17, 40]] = -4.0
    cases = [Case(SamplingParams(temperature=temperature), prompt=[0], seed=seed) for seed in range(4)]
    tokens = sample(logits, cases).token_ids
    assert tokens == sample(logits, cases, platform=Host()).token_ids
    if temperature < 1:
        assert tokens[:3] == logits[:3].argmax(dim=1).tolist()
    others = [Case(SamplingParams(temperature=temperature), seed=seed) for seed in range(8)]
    ties = sample(logits[3:, :64].expand(8, -1), others).token_ids
    assert set(ties) == {17, 40}, "equally likely, however low the temperature"


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
def test_nonfinite_logits_name_their_rows(value: float, options: dict) -> None:
    logits = random_logits(6, 130)
    logits[2, 77] = value
    logits[4] = -math.inf
    logits[5, 0] = value
    found = sample(logits, [Case(SamplingParams(**options), seed=i) for i in range(6)])
    assert found.nonfinite == (2, 4, 5)
    assert sorted(found.logprobs) == ([0, 1, 3] if "logprobs" in options else [])
    assert [found.token_ids[row] for row in (2, 4, 5)] == [0, 0, 0], "a nonfinite row still gets a token that exists"


def test_nonfinite_logits_that_rules_hide_are_found_by_log_probabilities() -> None:
    logits = random_logits(3, VOCAB)
    logits[1, 9] = math.nan
    cases = [
        Case(SamplingParams(temperature=0)),
        Case(SamplingParams(temperature=0, allowed_token_ids=[3, 4])),
        Case(SamplingParams(temperature=0, logprobs=1, allowed_token_ids=[3, 4])),
    ]
    assert sample(logits, cases).token_ids[1] in (3, 4)
    cases[1] = cases[2]
    found = sample(logits, cases)
    assert found.nonfinite == (1,)
    assert sorted(found.logprobs) == [2]


def test_a_row_forgets_what_its_last_owner_wanted() -> None:
    logits = random_logits(1, VOCAB)
    everything = Case(
        SamplingParams(
            temperature=1.0, top_k=1, logit_bias={1: 50.0}, allowed_token_ids=[1, 2], min_tokens=3, prompt_logprobs=1
        ),
        stop=[2],
        bad=[[4]],
    )
    plain = Case(SamplingParams(temperature=0))
    made = Prepared([everything])
    rows = made.rows
    assert made.sample(logits).token_ids == [1]
    assert rows.rows_with_prompt_logprobs == {0}
    rows.clear(0)
    assert rows.rows_with_prompt_logprobs == set()
    made.set(0, plain)
    assert made.sample(logits).token_ids == [int(logits.argmax())]
    # Another row of the batch has lists: this one has none.
    listed = Prepared([plain, everything])
    listed.set(0, everything)
    listed.sample(logits.expand(2, -1))
    listed.set(0, plain)
    assert listed.sample(logits.expand(2, -1)).token_ids == [int(logits.argmax()), 1]


def test_log_probabilities_of_given_tokens() -> None:
    """What prompts are scored with."""
    logits = random_logits(4, VOCAB).bfloat16()
    made = Prepared([Case(SamplingParams())])
    targets = [9, 0, 3, 202]
    expected = torch.log_softmax(logits.double(), dim=1)
    for num_top in (0, 3):
        for row, (entry, target) in enumerate(zip(made.logprobs(logits, targets, num_top)(), targets, strict=True)):
            order = sorted(range(VOCAB), key=lambda token, row=row: (-float(logits[row, token]), token))
            assert entry.token_ids == [target, *order[:num_top]]
            assert entry.logprobs == pytest.approx([float(expected[row, token]) for token in entry.token_ids], abs=1e-5)
            assert entry.rank == 1 + int((logits[row] > logits[row, target]).sum())
    logits[2, 5] = math.nan
    logits[0, 9] = -math.inf
    with pytest.raises(NonFiniteLogitsError) as caught:
        made.logprobs(logits, targets, 1)()
    assert caught.value.indices == (0, 2)
