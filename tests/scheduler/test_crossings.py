"""Where two features meet: cases that random traffic found, or that it meets too rarely."""

from __future__ import annotations

from typing import Any

from quire.request import FinishReason
from tests.fakes.core import CoreDriver, generate_alone, make_config


def make_driver(**options: Any) -> CoreDriver:
    return CoreDriver(make_config(preemption_mode="swap", num_host_blocks=40, **options))


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + 7 * i) % 90 + 1 for i in range(length)]


def test_a_swapped_request_comes_back_without_a_copy() -> None:
    """All that it left on the device is still cached there: its row is the only thing that the plan brings."""
    driver = make_driver(max_num_seqs=1)
    driver.add("swapped", prompt(8), max_tokens=5, priority=1)
    driver.step()
    driver.add("urgent", prompt(3, start=40), max_tokens=3, priority=-1)
    driver.run()
    stats = driver.core.stats()
    assert (stats.swap_preemptions_total, stats.swapped_in_blocks_total, stats.recomputed_tokens_total) == (1, 0, 0)
    assert driver.tokens["swapped", 0] == generate_alone(prompt(8), max_tokens=5)[0]


def test_beams_that_wait_for_candidates_are_recomputed() -> None:
    """With two plans in flight and another request to fill them, beams run in every other step."""
    expected = generate_alone(prompt(9), n=2, use_beam_search=True, max_tokens=8)
    num_swaps = []
    for steps in (3, 4):
        driver = make_driver(max_num_seqs=3, queue_depth=2)
        driver.add("other", prompt(5, start=20), max_tokens=30, priority=-1)
        driver.add("beams", prompt(9), n=2, use_beam_search=True, max_tokens=8, priority=1)
        for _ in range(steps):
            driver.step()
        driver.add("urgent", prompt(3, start=40), max_tokens=3, priority=-1)
        driver.run()
        assert driver.core.stats().preemptions_total == 1
        num_swaps.append(driver.core.stats().swap_preemptions_total)
        assert [driver.tokens["beams", index] for index in range(2)] == expected
    assert sorted(num_swaps) == [0, 1]


def test_beams_that_wait_for_nothing_are_swapped() -> None:
    driver = make_driver(max_num_seqs=2)
    driver.add("beams", prompt(9), n=2, use_beam_search=True, max_tokens=8, priority=1)
    for _ in range(3):
        driver.step()
    driver.add("urgent", prompt(3, start=40), max_tokens=3, priority=-1)
    driver.run()
    stats = driver.core.stats()
    assert (stats.preemptions_total, stats.swap_preemptions_total, stats.recomputed_tokens_total) == (1, 1, 0)
    expected = generate_alone(prompt(9), n=2, use_beam_search=True, max_tokens=8)
    assert [driver.tokens["beams", index] for index in range(2)] == expected


def test_a_prefix_that_is_preempted_while_its_last_step_runs_is_computed_again() -> None:
    driver = make_driver(num_blocks=7, queue_depth=2)
    driver.add("a", prompt(8), max_tokens=8)
    driver.add("b", prompt(8, start=40), max_tokens=8)
    for _ in range(3):
        driver.step()
    driver.register_prefix("prefix", prompt(4, start=60))
    driver.step()
    driver.step()
    assert driver.core.stats().preemptions_total == 2, "of the prefix and of b"
    driver.run(max_steps=100)
    assert driver.finished["prefix", 0] is FinishReason.LENGTH
    assert driver.core.stats().num_registered_blocks == 1


def test_a_beam_search_out_of_time_ends_as_its_hypotheses() -> None:
    driver = make_driver()
    driver.add("beams", prompt(9), n=2, best_of=4, use_beam_search=True, max_tokens=50, timeout_s=0.05)
    driver.run()
    assert driver.finished == {("beams", index): FinishReason.TIMEOUT for index in range(2)}
