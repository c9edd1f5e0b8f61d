"""Tokens that a constraint forces: no step samples them, the next one computes them all, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest

from quire.decoding.thinking_budget import BudgetConstraint
from quire.kv_cache.block_table import BlockTable
from quire.sampling_params import ThinkingBudget
from tests.fakes.core import CoreDriver, make_config
from tests.fakes.masks import AllowedByPosition

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


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_prefill_chunk": 2},
        {"num_blocks": 80, "block_size": 2},
        {"num_blocks": 80, "block_size": 2, "preemption_mode": "swap", "num_host_blocks": 60},
        {"num_blocks": 80, "block_size": 2, "queue_depth": 2},
        {"windows": (None, 6)},
        {"windows": (None, "state"), "state_snapshot_interval": 4},
    ],
)
def test_the_same_tokens(config: dict[str, Any]) -> None:
    plain = run(*REQUESTS, tells_forced=False, num_blocks=200)
    found = run(*REQUESTS, **config)
    assert found.tokens == plain.tokens
    assert found.finished == plain.finished
    assert num_appended(plain) == 0
    if "num_blocks" in config:
        assert found.core.stats().preemptions_total > 0
    if config.get("queue_depth") != 2:
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


def test_two_steps_in_flight_sample_every_token() -> None:
    """When a token is known, the step that samples the next one has begun."""
    assert num_steps(run({}, queue_depth=2)) == 40


@pytest.mark.parametrize("params", [{"logprobs": 0}, {"best_of": 2, "temperature": 1.0}])
def test_log_probabilities_need_every_step(params: dict[str, Any]) -> None:
    assert num_appended(run(params)) == 0


@pytest.mark.parametrize("queue_depth", [1, 2])
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


def test_blocks_of_forced_tokens_at_the_end_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KV connector is told of the tokens that were computed."""
    driver = CoreDriver(make_config())
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
    budget = ThinkingBudget(num_tokens=2, start=[5], end=[7, 8, 9], is_open=True)
    matcher = BudgetConstraint(None, budget, source.vocab_size).matcher(None, [])  # type: ignore[arg-type]
    for token, forced in ((1, None), (2, 7), (7, 8), (8, 9), (9, None)):
        assert matcher.accept(token)
        assert matcher.forced_token() == forced
