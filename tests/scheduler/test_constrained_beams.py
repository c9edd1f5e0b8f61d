"""Beam search under a constraint: each beam follows it by itself, and the search is that of a plain program."""

from __future__ import annotations

from typing import Any

import pytest

from quire.request import FinishReason
from quire.sampling_params import SamplingParams, ThinkingBudget
from quire.step import SequenceSampling
from tests.fakes.core import CoreDriver, generate_alone, make_config
from tests.fakes.masks import VOCAB_SIZE, AllowedByPosition
from tests.fakes.token_rule import TokenRule, mix

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
ENDS = tuple(range(0, VOCAB_SIZE, 4))

Found = list[tuple[list[int], float]]
"""(tokens, cumulative log-probability) of each hypothesis."""


def plain_search(
    constraint: str, width: int, max_tokens: int, ends: tuple[int, ...], length: int | None = None
) -> Found:
    """With every token of the vocabulary as a candidate. length: tokens behind which the text is complete."""
    source, rule = AllowedByPosition(), TokenRule(VOCAB_SIZE, None)
    every = SequenceSampling(SamplingParams(), 0, [], [], num_candidates=VOCAB_SIZE)
    beams: Found = [([], 0.0)]
    ended: Found = []
    while beams:
        continuations = []
        for tokens, cumulative in beams:
            ranked = rule.candidates(every, len(tokens), state_of(PROMPT + tokens))
            is_complete = len(tokens) == length
            allowed = source.is_allowed(constraint, tokens)
            for token, score in zip(ranked.token_ids, ranked.scores, strict=True):
                if token in ends if is_complete else allowed[token]:
                    continuations.append(([*tokens, token], cumulative + score))
        continuations.sort(key=lambda entry: -entry[1])
        beams = []
        for rank, (tokens, cumulative) in enumerate(continuations):
            if tokens[-1] in ends or len(tokens) == max_tokens or (len(tokens) == length and not ends):
                ended += [(tokens, cumulative)] if rank < width else []
            elif len(beams) < width:
                beams.append((tokens, cumulative))
        ended.sort(key=lambda entry: -entry[1] / len(entry[0]))
        del ended[width:]
        if beams and len(ended) == width and beams[0][1] / len(beams[0][0]) <= ended[-1][1] / len(ended[-1][0]):
            break
    return ended


def state_of(tokens: list[int]) -> int:
    state = 0
    for position, token in enumerate(tokens):
        state = mix(state, token, position)
    return state


def search(n: int, constraint: str, **params: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "n": n, "use_beam_search": True, "max_tokens": 12, "constraint": constraint, **params}


def hypotheses(driver: CoreDriver, name: str) -> Found:
    return [(driver.tokens[key], driver.rankings[key][0]) for key in sorted(driver.rankings) if key[0] == name]


@pytest.mark.parametrize("length", [None, 5])
@pytest.mark.parametrize("ends", [(), ENDS])
@pytest.mark.parametrize("constraint", ["5", "31", "70"])
def test_as_a_plain_search(constraint: str, ends: tuple[int, ...], length: int | None) -> None:
    """Constraints that leave 20, 3, and 1 or 2 tokens."""
    driver = CoreDriver(make_config(num_blocks=200))
    driver.masks.max_tokens = length
    for width in (1, 3, 6):
        name = str(width)
        driver.add(name, **search(width, constraint, eos=ends))
        driver.run()
        expected = plain_search(constraint, width, 12, ends, length)
        found = hypotheses(driver, name)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected])
        for index, (tokens, _) in enumerate(expected):
            is_cut = len(tokens) == 12 and tokens[-1] not in ends
            assert driver.finished[name, index] is (FinishReason.LENGTH if is_cut else FinishReason.STOP)
    driver.assert_all_free()


@pytest.mark.parametrize("queue_depth", [1, 2])
@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_the_same_beside_others_and_preempted(queue_depth: int, preemption_mode: str) -> None:
    requests = {
        "plain": {"prompt": PROMPT[:4], "max_tokens": 25},
        "beams": search(4, "5", eos=ENDS, early_stopping="never"),
        "forced": search(3, "70", length_penalty=0.0),
        "free beams": search(2, "", eos=ENDS[:2]),
        "samples": {"prompt": PROMPT, "max_tokens": 20, "n": 3, "temperature": 1.0, "constraint": "70"},
        "wide": search(5, "31", best_of=6, eos=ENDS[:3]),
    }
    driver = CoreDriver(
        make_config(
            num_blocks=42,
            block_size=2,
            windows=(None,),
            queue_depth=queue_depth,
            max_num_seqs=14,
            max_prefill_chunk=4,
            preemption_mode=preemption_mode,
            num_host_blocks=40 if preemption_mode == "swap" else 0,
        )
    )
    for name, request in requests.items():
        driver.add(name, **request)
    driver.run()
    assert driver.refused == {}
    assert driver.core.stats().preemptions_total > 0
    for name, request in requests.items():
        found = [tokens for key, tokens in sorted(driver.tokens.items()) if key[0] == name]
        assert found == generate_alone(**request)


def test_beams_that_think_end_their_thoughts_in_time() -> None:
    budget = ThinkingBudget(num_tokens=4, starts=[[88, 89]], ends=[[90, 91, 92]], is_open=True)
    driver = CoreDriver(make_config())
    driver.add("r", **search(4, "", max_tokens=9, thinking_budget=budget))
    driver.run()
    assert [driver.tokens["r", index][4:7] for index in range(4)] == [[90, 91, 92]] * 4


@pytest.mark.parametrize("ends", [(), ENDS])
def test_beams_that_cannot_go_on(ends: tuple[int, ...]) -> None:
    """What has ended before comes back; where nothing has, the search is an error that says why."""
    driver = CoreDriver(make_config())
    driver.masks.fails_after = 4
    driver.add("r", **search(3, "5", eos=ends, early_stopping="never"))
    driver.run()
    if ends:
        assert 1 <= len(driver.tokens["r", 0]) <= 4
        assert driver.finished["r", 0] is FinishReason.STOP
    else:
        assert {driver.finished["r", index] for index in range(3)} == {FinishReason.ERROR}
        assert ("r", 0) not in driver.tokens or driver.tokens["r", 0] == []
    driver.assert_all_free()


def test_workers_that_ignore_masks_are_an_error() -> None:
    driver = CoreDriver(make_config())
    driver.executor.ignores_masks = True
    driver.add("r", **search(3, "5"))
    driver.run()
    assert driver.finished["r", 0] is FinishReason.ERROR
