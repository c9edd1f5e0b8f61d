"""Tokens that a constraint forces: no step samples them, the next one computes them all, and nothing else changes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from quire.decoding.masks import ConstraintSpec
from quire.decoding.thinking_budget import BudgetConstraint
from quire.kv_cache.block_table import BlockTable
from quire.request import FinishReason
from quire.sampling_params import ThinkingBudget
from quire.step import SamplingInputs
from tests.fakes.core import CoreDriver, generate_alone, make_config
from tests.fakes.masks import AllowedByPosition
from tests.long import all_but_long

SOME, ALL = "70", "97"
"""Constraints under which one token is allowed at some places (two at the others), and at every place."""


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + 7 * i) % 90 + 1 for i in range(length)]


def run(*requests: dict[str, Any], tells_forced: bool = True, **config: Any) -> CoreDriver:
    driver = CoreDriver(make_config(**config), record=True)
    driver.masks.tells_forced = tells_forced
    for number, request in enumerate(requests):
        driver.add(str(number), **{"prompt": prompt(9, start=number), "max_tokens": 40, "constraint": SOME, **request})
    driver.run()
    return driver


def num_steps(driver: CoreDriver) -> int:
    return sum(bool(plan.seq_ids) for plan in driver.executor.plans)


def num_appended(driver: CoreDriver) -> int:
    return sum(len(tokens) for plan in driver.executor.plans for tokens in plan.appended.values())


REQUESTS: list[dict[str, Any]] = [
    {},
    {"n": 3, "temperature": 1.0, "seed": 3},
    {"prompt": prompt(5), "constraint": ALL},
    {"constraint": ""},
    {"max_tokens": 7, "stop_token_ids": [21, 40, 63]},
]


@pytest.mark.parametrize("queue_depth", [1, 2, 3])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_prefill_chunk": 2},
        {"num_blocks": 80, "block_size": 2},
        {"num_blocks": 80, "block_size": 2, "preemption_mode": "swap", "num_host_blocks": 60},
        {"windows": (None, 6)},
        {"windows": (None, "state"), "state_snapshot_interval": 4},
    ],
)
def test_the_same_tokens(config: dict[str, Any], queue_depth: int) -> None:
    plain = run(*REQUESTS, tells_forced=False, num_blocks=200)
    found = run(*REQUESTS, queue_depth=queue_depth, **config)
    assert found.tokens == plain.tokens
    assert found.finished == plain.finished
    assert num_appended(plain) == 0
    if "num_blocks" in config:
        assert found.core.stats().preemptions_total > 0
    assert num_appended(found) > 20


def test_one_step_for_all_forced_tokens() -> None:
    """The first is sampled, and all that follow it are certain: they reach the length limit without a further step."""
    driver = run({"constraint": ALL})
    assert num_steps(driver) == 1
    assert len(driver.tokens["0", 0]) == 40
    assert driver.core.stats().generation_tokens_total == 40
    some = run({})
    assert num_steps(some) < 20
    assert num_steps(some) + num_appended(some) == 40 - 1, "the last token is forced, and never sent"


def test_with_two_steps_in_flight_the_second_samples_the_first_forced_token() -> None:
    """It has begun when they become known; the step behind it computes all that follow."""
    assert num_steps(run({"constraint": ALL}, queue_depth=2)) == 2
    driver = run({}, queue_depth=2)
    tokens = driver.tokens["0", 0]
    is_forced = [driver.masks.is_allowed(SOME, tokens[:place]).sum() == 1 for place in range(40)]
    runs = [len(list(group)) for forced, group in itertools.groupby(is_forced) if forced]
    assert max(runs) == 4
    assert num_appended(driver) == sum(runs) - len(runs)
    assert num_steps(driver) + num_appended(driver) == 40


@pytest.mark.parametrize("params", [{"logprobs": 0}, {"best_of": 2, "temperature": 1.0}])
def test_log_probabilities_need_every_step(params: dict[str, Any]) -> None:
    assert num_appended(run(params)) == 0


@pytest.mark.parametrize("queue_depth", all_but_long([1, 2, 3], [2]))
def test_preempted_with_forced_tokens(queue_depth: int) -> None:
    """At every moment: the workers get them once, with all tokens of the sequence."""
    requests = [{"prompt": prompt(4, start), "n": n, "temperature": 1.0} for start, n in ((1, 1), (2, 3), (3, 2))]
    plain = run(*requests, tells_forced=False, num_blocks=400)
    num_preemptions = 0
    for num_blocks in range(68, 110, 3):
        found = run(*requests, num_blocks=num_blocks, block_size=2, queue_depth=queue_depth, max_prefill_chunk=3)
        assert found.tokens == plain.tokens
        num_preemptions += found.core.stats().preemptions_total
    assert num_preemptions >= 20


@pytest.mark.parametrize("queue_depth", [2, 3])
@pytest.mark.parametrize("steps", range(2, 12))
def test_aborted_while_a_forced_token_is_sampled(steps: int, queue_depth: int) -> None:
    """And the end that a stop string asks for, of one sequence."""
    driver = CoreDriver(make_config(queue_depth=queue_depth, num_blocks=60))
    requests = {name: {"prompt": prompt(5, start), "n": 2, "temperature": 1.0} for start, name in enumerate("abc")}
    for name, request in requests.items():
        driver.add(name, max_tokens=20, constraint=SOME, **request)
    for _ in range(steps):
        driver.step()
    driver.abort("a")
    driver.abort("b", 0)
    driver.run()
    for name, request in requests.items():
        alone = generate_alone(max_tokens=20, constraint=SOME, **request)
        for index, tokens in enumerate(alone):
            found = driver.tokens.get((name, index), [])
            is_whole = name == "c" or (name, index) == ("b", 1)
            assert found == (tokens if is_whole else tokens[: len(found)])
    driver.assert_all_free()


def test_a_worker_that_does_not_sample_a_foreseen_token_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = CoreDriver(make_config(queue_depth=2))
    driver.add("r", prompt(9), max_tokens=40, constraint=SOME)
    [sequence] = driver.scheduler._requests["r"].sequences
    send_inputs = driver.executor.send_sampling_inputs

    def send(inputs: SamplingInputs) -> None:
        driver.executor.ignores_masks = sequence.foreseen is not None
        send_inputs(inputs)

    monkeypatch.setattr(driver.executor, "send_sampling_inputs", send)
    driver.run()
    assert driver.finished["r", 0] is FinishReason.ERROR


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_blocks_of_forced_tokens_at_the_end_hold_nothing(queue_depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A KV connector is told of the tokens that were computed."""
    driver = CoreDriver(make_config(queue_depth=queue_depth))
    kv, stored = driver.scheduler.kv, []

    def finish(request_id: str, seq_id: int, blocks: BlockTable, num_tokens: int) -> None:
        stored.append(num_tokens)
        kv.free(blocks)

    monkeypatch.setattr(kv, "finish", finish)
    driver.add("forced", prompt(9), max_tokens=40, constraint=ALL)
    driver.run()
    driver.add("sampled", prompt(9), max_tokens=40)
    driver.run()
    assert stored == [9, 48]


def test_the_mark_that_ends_thoughts_is_forced() -> None:
    source = AllowedByPosition()
    budget = ThinkingBudget(num_tokens=2, starts=[[5]], ends=[[7, 8, 9]], is_open=True)
    matcher = BudgetConstraint(None, budget, source.vocab_size).matcher(ConstraintSpec(), [])
    matcher.advance([1], 10)
    assert matcher.forced == []
    sampled = matcher.copy()
    matcher.advance([2], 10)
    assert matcher.forced == [7, 8, 9]
    assert matcher.mask() is None
    for token, following in ((2, 7), (7, 8), (8, 9)):
        sampled.advance([token], 0)
        assert sampled.forced == []
        assert sampled.mask() == matcher.mask_of(following)
