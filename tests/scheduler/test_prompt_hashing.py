"""Long prompts are hashed in pieces beside running sequences, with the hits of a prompt that is hashed at once."""

from __future__ import annotations

import pytest

from tests.fakes.core import CoreDriver, generate_alone, make_config

PIECE, SHORT = 12, 8
"""Tokens hashed in a pass, and that may be left for the look-up to hash; blocks have 4."""
LONG = [(7 * i) % 90 + 1 for i in range(90)]
SECOND = [(11 * i) % 90 + 1 for i in range(90)]


def make_driver(**options) -> CoreDriver:  # type: ignore[no-untyped-def]
    options = {"num_blocks": 100, "max_num_batched_tokens": 200, **options}
    driver = CoreDriver(make_config(**options), record=True)
    hashing = driver.scheduler._admitter._hashing
    hashing.piece_tokens, hashing.short_tokens = PIECE, SHORT
    return driver


def start_stream(driver: CoreDriver, name: str = "stream") -> None:
    driver.add(name, [5, 6, 7], max_tokens=40)
    driver.step()


def num_hashed(driver: CoreDriver, *names: str) -> int:
    """Blocks."""
    return sum(driver.scheduler._requests[name].sequences[0].chain.num_blocks for name in names)


def started_in(driver: CoreDriver, prompt: list[int]) -> int:
    """The step in which a prompt started."""
    return next(plan.step_id for plan in driver.executor.plans for new in plan.new_sequences if new.token_ids == prompt)


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_a_running_sequence_gets_a_token_beside_each_piece(queue_depth: int) -> None:
    driver = make_driver(queue_depth=queue_depth)
    start_stream(driver)
    driver.add("long", LONG, max_tokens=20)
    driver.add("second", SECOND, max_tokens=20)
    before = 0
    for _ in range(15):  # 22 blocks of each, three in a pass
        num_tokens = len(driver.tokens["stream", 0])
        driver.step()
        hashed = num_hashed(driver, "long", "second")
        assert 0 < hashed - before <= (PIECE + SHORT) // 4 or hashed == 44
        before = hashed
        assert len(driver.tokens["stream", 0]) == num_tokens + 1
    driver.run()
    assert started_in(driver, LONG) < started_in(driver, SECOND)
    assert driver.tokens["long", 0] == generate_alone(LONG, max_tokens=20)[0]
    assert driver.tokens["second", 0] == generate_alone(SECOND, max_tokens=20)[0]


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6)])
def test_the_hits_are_those_of_a_prompt_that_is_hashed_at_once(windows: tuple[int | None, ...]) -> None:
    hits = []
    for runs_beside in (False, True):
        driver = make_driver(windows=windows)
        driver.add("first", LONG[:61])
        driver.run()
        if runs_beside:
            start_stream(driver)
        driver.add("long", LONG)
        driver.run()
        assert driver.tokens["long", 0] == generate_alone(LONG)[0]
        hits.append(driver.core.stats().prefix_cache_hits_total)
    assert hits == [60, 60]


def test_an_idle_engine_hashes_a_prompt_at_once() -> None:
    driver = make_driver()
    driver.add("long", LONG)
    driver.step()
    assert started_in(driver, LONG) == 0


def test_short_requests_start_meanwhile_and_leave_the_blocks() -> None:
    driver = make_driver(num_blocks=32)
    driver.scheduler._admitter._hashing.short_tokens = 40
    start_stream(driver)
    driver.add("long", LONG)  # 23 blocks
    driver.add("short", [8, 9], max_tokens=2)
    driver.add("wide", SECOND[:33], max_tokens=2)
    driver.step()
    assert driver.core.stats().num_deferred == 1
    assert started_in(driver, [8, 9]) == 1
    driver.run()
    assert started_in(driver, LONG) < started_in(driver, SECOND[:33]), "there was no room for both"
    assert driver.core.stats().preemptions_total == 0


def test_an_urgent_prompt_is_hashed_before_others_are_preempted_for_it() -> None:
    driver = make_driver(max_num_seqs=1)
    start_stream(driver)
    driver.add("urgent", LONG, priority=-5)
    for _ in range(7):
        driver.step()
    assert driver.core.stats().preemptions_total == 0
    driver.run()
    assert driver.core.stats().preemptions_total == 1
    assert [name for name, _ in driver.finished] == ["urgent", "stream"]


def test_an_abort_ends_the_wait() -> None:
    driver = make_driver()
    start_stream(driver)
    driver.add("long", LONG)
    driver.step()
    driver.abort("long")
    driver.scheduler.check()
    assert driver.core.stats().num_waiting == 0
    driver.run()
