"""Pause in the core: which requests go on, which wait, and that the tokens are those of an undisturbed run."""

from __future__ import annotations

import pytest

from quire.engine.messages import Call, CallResult
from quire.request import FinishReason
from tests.fakes.core import CoreDriver, generate_alone, make_config

PROMPT = list(range(1, 20))


def call(driver: CoreDriver, method: str, argument: str = "") -> CallResult:
    answer = driver.core.handle(Call(1, method, argument))
    assert answer is not None
    return answer


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [64, 12])
def test_a_kept_request_goes_on_with_the_same_tokens(depth: int, num_blocks: int) -> None:
    driver = CoreDriver(make_config(queue_depth=depth, num_blocks=num_blocks))
    driver.add("a", PROMPT, max_tokens=20, n=1, temperature=1.0, seed=3)
    driver.add("b", PROMPT[3:], max_tokens=20)
    for _ in range(7):
        driver.step()
    assert call(driver, "pause", "all").error is None
    for _ in range(depth):
        driver.step()  # what was planned before
    steps, tokens = driver.core.stats().steps_total, {key: list(ids) for key, ids in driver.tokens.items()}
    driver.add("c", PROMPT, max_tokens=3)
    for _ in range(5):
        driver.step()
    assert driver.core.is_blocked
    assert (driver.core.stats().steps_total, driver.tokens) == (steps, tokens)
    assert call(driver, "is_paused").value == 2
    call(driver, "resume")
    driver.run()
    assert driver.tokens["a", 0] == generate_alone(PROMPT, max_tokens=20, temperature=1.0, seed=3)[0]
    assert driver.tokens["b", 0] == generate_alone(PROMPT[3:], max_tokens=20)[0]
    assert driver.tokens["c", 0] == generate_alone(PROMPT, max_tokens=3)[0]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_running_and_preempted_requests_end_while_new_ones_wait(mode: str) -> None:
    config = make_config(num_blocks=12, preemption_mode=mode, num_host_blocks=12, scheduling_policy="priority")
    driver = CoreDriver(config)
    for name in "ab":
        driver.add(name, PROMPT, max_tokens=26)
    while not driver.core.stats().num_preempted:
        driver.step()
    call(driver, "pause", "new")
    driver.add("late", PROMPT, max_tokens=4, priority=-5)
    while (stats := driver.core.stats()).num_running + stats.num_preempted:
        driver.step()
    assert set(driver.finished) == {("a", 0), ("b", 0)}
    for _ in range(3):
        driver.step()
    assert (driver.core.stats().num_waiting, driver.core.has_work, driver.core.is_blocked) == (1, True, True)
    call(driver, "resume")
    driver.run()
    for name, length in (("a", 26), ("b", 26), ("late", 4)):
        assert driver.tokens[name, 0] == generate_alone(PROMPT, max_tokens=length)[0]


def test_all_requests_are_ended_and_told_so() -> None:
    driver = CoreDriver(make_config(max_num_seqs=4))
    driver.register_prefix("prefix", PROMPT[:8])
    driver.step()
    driver.add("some", PROMPT, n=2, max_tokens=9, temperature=1.0)
    driver.add("search", PROMPT, n=2, max_tokens=9, use_beam_search=True, best_of=2)
    for _ in range(4):
        driver.step()
    driver.add("waiting", PROMPT, max_tokens=9)
    call(driver, "pause", "new")
    assert call(driver, "abort_all").value == 5
    driver.step()
    ends = {key: reason for key, reason in driver.finished.items() if key[0] != "prefix"}
    keys = {("some", 0), ("some", 1), ("search", 0), ("search", 1), ("waiting", 0)}
    assert ends == dict.fromkeys(keys, FinishReason.ABORT)
    call(driver, "resume")
    driver.run()


def test_a_request_that_waits_can_be_aborted_or_run_out_of_time() -> None:
    driver = CoreDriver(make_config())
    call(driver, "pause", "all")
    driver.add("a", PROMPT)
    driver.add("b", PROMPT, timeout_s=0.05)
    driver.abort("a")
    for _ in range(10):
        driver.step()
    assert driver.finished == {("b", 0): FinishReason.TIMEOUT}
    assert not driver.core.has_work


def test_a_scope_that_there_is_not() -> None:
    driver = CoreDriver(make_config())
    assert "must be one of new, all" in str(call(driver, "pause", "some").error)
    assert call(driver, "is_paused").value == 0
