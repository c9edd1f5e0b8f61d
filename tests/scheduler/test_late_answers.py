"""Matchers that answer late: their sequences stay out of steps, other sequences go on, and no token changes."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from quire.request import FinishReason
from tests.fakes.core import CoreDriver, generate_alone, make_config
from tests.fakes.masks import REFUSED
from tests.long import one_in


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + 7 * i) % 90 + 1 for i in range(length)]


REQUESTS: dict[str, dict[str, Any]] = {
    "one": {"prompt": prompt(9), "max_tokens": 12, "constraint": "5"},
    "many": {"prompt": prompt(6, 3), "max_tokens": 10, "n": 3, "temperature": 1.0, "seed": 3, "constraint": "7"},
    "forced": {"prompt": prompt(5, 4), "max_tokens": 24, "constraint": "70"},
    "free": {"prompt": prompt(7, 5), "max_tokens": 14},
    "beams": {"prompt": prompt(8, 6), "max_tokens": 6, "n": 3, "use_beam_search": True, "constraint": "3"},
}


def late(seed: int, most: int) -> Any:
    rng = random.Random(seed)
    return iter(lambda: rng.randrange(most + 1), None)


@pytest.mark.parametrize(("seed", "queue_depth"), one_in(2, range(6), [1, 2, 3]))
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_blocks": 34, "block_size": 2, "max_prefill_chunk": 3},
        {"num_blocks": 34, "block_size": 2, "preemption_mode": "swap", "num_host_blocks": 40},
    ],
)
def test_the_same_tokens(config: dict[str, Any], queue_depth: int, seed: int) -> None:
    driver = CoreDriver(make_config(queue_depth=queue_depth, **config))
    driver.masks.compile_waits = seed
    driver.masks.answer_waits = late(seed, 4)
    driver.masks.is_slow = seed % 2 == 1
    driver.masks.mask_waits = late(seed + 1, 0 if driver.masks.is_slow else 8)
    driver.masks.goes_on = seed > 1
    driver.masks.takes_time = True
    for name, request in REQUESTS.items():
        driver.add(name, **request)
    driver.run()
    for name, request in REQUESTS.items():
        found = [driver.tokens[name, index] for index in range(request.get("n", 1))]
        assert found == generate_alone(**request), name
    assert (driver.core.stats().preemptions_total > 0) == ("num_blocks" in config)
    assert (driver.executor.num_discarded > 0) == (not driver.masks.is_slow)
    assert driver.core.stats().generation_tokens_total == sum(map(len, driver.tokens.values()))
    driver.assert_all_free()


def test_other_requests_do_not_wait_for_a_slow_matcher() -> None:
    """Another request ends while the first token of the constrained one waits for its matcher."""
    driver = CoreDriver(make_config())
    driver.masks.answer_waits = itertools.repeat(10**6)
    driver.add("bound", prompt(9), max_tokens=6, constraint="5")
    driver.add("free", prompt(9, 4), max_tokens=20)
    while ("free", 0) not in driver.finished:
        driver.step()
    assert ("bound", 0) not in driver.tokens, "a token is reported when the matcher has followed it"
    driver.abort("bound")
    driver.run()
    driver.assert_all_free()


def observed(answer_waits: list[int], mask_waits: list[int]) -> CoreDriver:
    """One request that goes ahead, with these waits for its answers and masks, is over; `plans` has its steps."""
    driver = CoreDriver(make_config(), record=True)
    driver.masks.goes_on = driver.masks.takes_time = True
    driver.masks.answer_waits = iter([*answer_waits, *[0] * 100])
    driver.masks.mask_waits = iter([*mask_waits, *[0] * 100])
    driver.add("bound", prompt(9), max_tokens=12, constraint="5")
    driver.run()
    assert driver.tokens["bound", 0] == generate_alone(prompt(9), max_tokens=12, constraint="5")[0]
    return driver


def test_the_next_step_is_computed_while_a_matcher_answers() -> None:
    """Behind a token that nothing has followed by force, the step that computes it begins before the answer: no step
    is without the sequence, and none is lost."""
    driver = observed([1] * 12, [])
    assert len(driver.executor.plans) == 12
    assert driver.executor.num_discarded == 0


@pytest.mark.parametrize(("answer_waits", "mask_waits"), [([0, 0, 0, 20], []), ([], [0, 0, 0, 20])])
def test_a_late_mask_costs_one_sample(answer_waits: list[int], mask_waits: list[int]) -> None:
    """The step waits for LATE_SECONDS, its sample is discarded, and the sequence stays out of steps until its mask is
    there. Other sequences go on."""
    driver = observed(answer_waits, mask_waits)
    assert driver.executor.num_discarded == 1
    assert len(driver.executor.plans) == 13


@pytest.mark.parametrize("queue_depth", [1, 2])
@pytest.mark.parametrize("steps", range(1, 9))
def test_aborted_while_a_matcher_is_asked(steps: int, queue_depth: int) -> None:
    driver = CoreDriver(make_config(queue_depth=queue_depth))
    driver.masks.answer_waits = late(steps, 3)
    for name in ("one", "many", "beams"):
        driver.add(name, **REQUESTS[name])
    for _ in range(steps):
        driver.step()
    driver.abort("many", 1)
    driver.abort("beams")
    driver.run()
    many = generate_alone(**REQUESTS["many"])
    assert driver.tokens["one", 0] == generate_alone(**REQUESTS["one"])[0]
    assert [driver.tokens["many", 0], driver.tokens["many", 2]] == [many[0], many[2]]
    driver.assert_all_free()


@pytest.mark.parametrize("compile_waits", [0, 5])
def test_a_constraint_that_does_not_compile_is_refused(compile_waits: int) -> None:
    driver = CoreDriver(make_config())
    driver.masks.compile_waits = compile_waits
    driver.add("bad", prompt(9), max_tokens=6, n=2, constraint=str(REFUSED + 1))
    driver.add("good", prompt(9, 4), max_tokens=6, constraint="5")
    driver.run()
    assert driver.refused == {"bad": f"{REFUSED + 1} does not compile"}
    assert ("bad", 0) not in driver.tokens
    assert driver.finished["good", 0] is FinishReason.LENGTH
    driver.assert_all_free()


def test_matchers_are_known_by_their_clients() -> None:
    driver = CoreDriver(make_config())
    driver.add("a", prompt(4), max_tokens=2, constraint="5", client="alice")
    driver.run()
    assert driver.masks.clients == ["alice"]
