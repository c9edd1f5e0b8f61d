"""Constrained requests: the mask of a token is made when the token before is known, while its step is in flight."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from quire.clock import VirtualClock
from quire.engine.core import EngineCore
from quire.engine.messages import AddRequest
from quire.request import EngineRequest, FinishReason
from quire.sampling_params import SamplingParams
from tests.fakes.core import CoreDriver, generate_alone, make_config
from tests.fakes.executor import FakeExecutor
from tests.fakes.masks import NumberMatcher


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + 7 * i) % 90 + 1 for i in range(length)]


def make_driver(**options: Any) -> CoreDriver:
    return CoreDriver(make_config(**options), record=True)


@pytest.mark.parametrize("queue_depth", [1, 2, 3])
@pytest.mark.parametrize("max_prefill_chunk", [None, 3])
def test_tokens_follow_the_constraint(queue_depth: int, max_prefill_chunk: int | None) -> None:
    driver = make_driver(queue_depth=queue_depth, max_prefill_chunk=max_prefill_chunk)
    driver.add("first", prompt(9), max_tokens=12, constraint="5")
    driver.add("free", prompt(9, start=4), max_tokens=14)
    driver.add("pooled", prompt(9, start=8), max_tokens=1, pooling=True)
    driver.add("many", prompt(9, start=6), max_tokens=10, n=3, temperature=1.0, constraint="7", seed=3)
    driver.run()
    assert driver.tokens["first", 0] == generate_alone(prompt(9), max_tokens=12, constraint="5")[0]
    assert driver.tokens["first", 0] != generate_alone(prompt(9), max_tokens=12)[0]
    assert driver.masks.follows("5", driver.tokens["first", 0])
    assert driver.tokens["free", 0] == generate_alone(prompt(9, start=4), max_tokens=14)[0]
    many = generate_alone(prompt(9, start=6), max_tokens=10, n=3, temperature=1.0, constraint="7", seed=3)
    assert [driver.tokens["many", index] for index in range(3)] == many
    assert all(driver.masks.follows("7", tokens) for tokens in many)


def test_planned_one_token_ahead_and_no_further() -> None:
    driver = make_driver()
    driver.add("bound", prompt(5), max_tokens=20, constraint="5")
    driver.add("free", prompt(5, start=3), max_tokens=20)
    scheduler = driver.scheduler
    driver.masks.flush()
    driver.masks.wait([], 0)
    plans = [scheduler.schedule(0.0) for _ in range(4)]
    assert [len(plan.seq_ids) for plan in plans] == [2, 2, 1, 1], "its third token needs the mask behind the second"
    assert [plan.masked_samples for plan in plans] == [[0], [0], [], []]


@pytest.mark.parametrize("queue_depth", [1, 2, 3])
@pytest.mark.parametrize("index", [None, 1])
def test_aborted_before_its_mask_is_sent(queue_depth: int, index: int | None) -> None:
    driver = make_driver(queue_depth=queue_depth)
    driver.add("gone", prompt(6), max_tokens=20, n=2, temperature=1.0, constraint="5")
    driver.add("stays", prompt(6, start=4), max_tokens=20, constraint="7")
    for _ in range(4):
        driver.step()
    driver.abort("gone", index)
    driver.run()
    assert driver.tokens["stays", 0] == generate_alone(prompt(6, start=4), max_tokens=20, constraint="7")[0]
    if index is not None:
        expected = generate_alone(prompt(6), max_tokens=20, n=2, temperature=1.0, constraint="5")
        assert driver.tokens["gone", 0] == expected[0]


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
@pytest.mark.parametrize("queue_depth", [1, 2, 3])
def test_preempted_with_a_mask_to_come(preemption_mode: str, queue_depth: int) -> None:
    driver = make_driver(
        num_blocks=9,
        block_size=2,
        queue_depth=queue_depth,
        windows=(None,),
        preemption_mode=preemption_mode,
        num_host_blocks=20 if preemption_mode == "swap" else 0,
    )
    for number in range(3):
        driver.add(str(number), prompt(3, start=number), max_tokens=12, constraint="5")
    driver.run()
    assert driver.core.stats().preemptions_total > 0
    for number in range(3):
        expected = generate_alone(prompt(3, start=number), max_tokens=12, constraint="5")[0]
        assert driver.tokens[str(number), 0] == expected


def test_an_unknown_constraint_is_refused() -> None:
    driver = make_driver()
    driver.add("r", prompt(4), constraint="digits")
    driver.run()
    assert driver.refused == {"r": "'digits' is not a number"}


@pytest.mark.parametrize(
    ("params", "message", "param"),
    [
        (
            {"pooling": True, "use_beam_search": True, "n": 2},
            "a pooled request has no tokens: it takes no beam search",
            "use_beam_search",
        ),
        ({"pooling": True, "n": 2}, "a pooled request has one vector: n must be 1, not 2", "n"),
        ({"pooling": True, "best_of": 3}, "a pooled request has one vector: best_of must be 1, not 3", "best_of"),
    ],
)
def test_what_is_impossible_together_is_refused(params: dict[str, Any], message: str, param: str) -> None:
    driver = make_driver()
    driver.add("wrong", prompt(5), **params)
    [rejection] = driver.core.step().rejections
    assert (rejection.message, rejection.param) == (message, param)
    assert not driver.core.has_work


def test_an_engine_without_constraints_refuses_them() -> None:
    core = EngineCore(make_config(), FakeExecutor(), VirtualClock())
    params = SamplingParams()
    core.handle(
        AddRequest(
            EngineRequest(request_id="r", prompt_token_ids=[1], params=params, max_tokens=4, seed=0, constraint="5")
        )
    )
    [rejected] = core.step().rejections
    assert (rejected.message, rejected.param) == ("this engine has no constraints on tokens", "constraint")


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_a_request_waits_until_its_constraint_is_compiled_and_others_run(queue_depth: int) -> None:
    driver = make_driver(queue_depth=queue_depth)
    driver.masks.compile_waits = 12
    driver.add("bound", prompt(9), max_tokens=6, constraint="5")
    driver.add("free", prompt(9, start=4), max_tokens=4)
    for _ in range(5):
        driver.step()
    assert driver.finished["free", 0] is FinishReason.LENGTH
    assert ("bound", 0) not in driver.tokens
    driver.run()
    assert driver.tokens["bound", 0] == generate_alone(prompt(9), max_tokens=6, constraint="5")[0]


def test_an_abort_ends_the_wait_for_a_constraint() -> None:
    driver = make_driver()
    driver.masks.compile_waits = 10**6
    driver.add("bound", prompt(9), max_tokens=6, constraint="5")
    driver.step()
    assert driver.core.scheduler.awaits_answers
    driver.abort("bound")
    driver.run()
    assert driver.tokens == {}


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_the_end_of_a_constraint_ends_the_sequence(queue_depth: int) -> None:
    driver = make_driver(queue_depth=queue_depth)
    driver.masks.max_tokens = 4
    driver.add("bound", prompt(9), max_tokens=20, n=2, temperature=1.0, constraint="5")
    driver.add("free", prompt(9, start=4), max_tokens=14)
    driver.run()
    assert [len(driver.tokens["bound", index]) for index in range(2)] == [4, 4]
    assert driver.finished["bound", 0] is driver.finished["bound", 1] is FinishReason.STOP
    assert driver.tokens["free", 0] == generate_alone(prompt(9, start=4), max_tokens=14)[0]


@pytest.mark.parametrize("queue_depth", [1, 2])
@pytest.mark.parametrize("fails_after", [0, 3])
def test_a_constraint_that_cannot_be_followed_ends_its_sequences_with_an_error(
    queue_depth: int, fails_after: int
) -> None:
    driver = make_driver(queue_depth=queue_depth)
    driver.masks.fails_after = fails_after
    driver.add("bound", prompt(9), max_tokens=20, n=2, temperature=1.0, constraint="5")
    driver.add("free", prompt(9, start=4), max_tokens=14)
    driver.run()
    assert driver.finished["bound", 0] is driver.finished["bound", 1] is FinishReason.ERROR
    assert [len(driver.tokens["bound", index]) for index in range(2)] == [fails_after] * 2
    assert driver.tokens["free", 0] == generate_alone(prompt(9, start=4), max_tokens=14)[0]


def test_a_token_outside_the_constraint_is_not_reported() -> None:
    """What a worker that ignores masks would do."""
    driver = make_driver()
    driver.executor.ignores_masks = True
    driver.add("bound", prompt(9), max_tokens=20, constraint="97")
    driver.run()
    assert driver.finished["bound", 0] is FinishReason.ERROR
    assert driver.masks.follows("97", driver.tokens["bound", 0])


@pytest.fixture
def matchers(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[NumberMatcher]]:
    """All that are made in the test."""
    made: list[weakref.ref[NumberMatcher]] = []
    begin = NumberMatcher.__init__

    def begin_noted(self: NumberMatcher, *args: Any) -> None:
        made.append(weakref.ref(self))
        begin(self, *args)

    monkeypatch.setattr(NumberMatcher, "__init__", begin_noted)
    return made


def test_matchers_outlive_preemptions_and_end_with_their_sequences(
    matchers: list[weakref.ref[NumberMatcher]],
) -> None:
    driver = make_driver(num_blocks=12, queue_depth=2)
    for number in range(3):
        driver.add(str(number), prompt(9, start=number), max_tokens=16, constraint="5")
    driver.run()
    assert driver.core.stats().preemptions_total > 0
    for number in range(3):
        expected = generate_alone(prompt(9, start=number), max_tokens=16, constraint="5")[0]
        assert driver.tokens[str(number), 0] == expected
    assert matchers
    assert not [each for matcher in matchers if (each := matcher()) is not None]


@pytest.mark.parametrize("params", [{}, {"n": 3, "temperature": 1.0}, {"n": 2, "use_beam_search": True}])
@pytest.mark.parametrize("steps", [2, 100])
def test_matchers_end_with_their_requests_and_not_with_a_collection(
    params: dict[str, Any], steps: int, matchers: list[weakref.ref[NumberMatcher]]
) -> None:
    """They cost memory elsewhere, and an idle engine collects nothing."""
    driver = make_driver()
    gc.disable()
    try:
        driver.add("r", prompt(9), max_tokens=16, constraint="5", **params)
        for _ in range(steps):
            driver.step()
        driver.abort("r")
        driver.run()
        driver.add("next", prompt(9), max_tokens=2)
        driver.run()
        alive = [each for matcher in matchers if (each := matcher()) is not None]
    finally:
        gc.enable()
    assert matchers
    assert alive == []
