"""Registered prefixes: computed once, hit to the last token, never evicted or preempted, and never too many."""

from __future__ import annotations

import pytest

from quire.errors import UserError
from quire.request import FinishReason
from quire.scheduler.plan_builder import PlanBuilder
from tests.fakes.core import CoreDriver, generate_alone, make_config

PREFIX = [(5 * i) % 90 + 1 for i in range(22)]
"""Five full blocks of four tokens, and two tokens of the next."""
WINDOWS = [(None, None), (6, 6), (None, 6), (None, 6, 11)]


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + 7 * i) % 90 + 1 for i in range(length)]


def registered(**options) -> CoreDriver:  # type: ignore[no-untyped-def]
    """A driver whose engine has PREFIX registered as "p"."""
    driver = CoreDriver(make_config(**options), record=True)
    driver.register_prefix("p", PREFIX)
    driver.run()
    assert driver.scheduler.kv.is_registered("p"), driver.refused
    return driver


def fill(driver: CoreDriver, number: int = 6) -> None:
    """Drive other content through the whole pool."""
    for index in range(number):
        driver.add(f"filler{index}", prompt(24, start=30 + index), max_tokens=4)
        driver.run()
    assert driver.core.stats().evictions_total > 0


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("queue_depth", [1, 2])
@pytest.mark.parametrize("chunk", [None, 1, 5])
def test_a_prompt_that_goes_on_begins_behind_the_last_token(
    windows: tuple[int | None, ...], queue_depth: int, chunk: int | None
) -> None:
    driver = registered(windows=windows, queue_depth=queue_depth, max_prefill_chunk=chunk, num_blocks=120)
    before = driver.core.stats()
    driver.add("r", [*PREFIX, 7, 8, 9], max_tokens=9)
    driver.run()
    stats = driver.core.stats()
    assert stats.prefix_cache_hits_total - before.prefix_cache_hits_total == len(PREFIX)
    assert stats.scheduled_tokens_total - before.scheduled_tokens_total == 3 + 8
    assert stats.copied_blocks_total == driver.scheduler.kv.num_groups, "the partial block of every group"
    assert driver.tokens["r", 0] == generate_alone([*PREFIX, 7, 8, 9], max_tokens=9)[0]
    driver.scheduler.kv.check()


@pytest.mark.parametrize("length", range(1, 10))
def test_prefixes_of_every_length(length: int) -> None:
    driver = CoreDriver(make_config())
    driver.register_prefix("p", PREFIX[:length])
    driver.run()
    for name, ids in (("a", [*PREFIX[:length], 50]), ("same", PREFIX[:length])):
        hits = driver.core.stats().prefix_cache_hits_total
        driver.add(name, ids, max_tokens=3)
        driver.run()
        expected = length if name == "a" else (length - 1) // 4 * 4
        assert driver.core.stats().prefix_cache_hits_total - hits == expected
        assert driver.tokens[name, 0] == generate_alone(ids, max_tokens=3)[0]


def test_who_differs_in_the_last_block_shares_the_full_ones() -> None:
    driver = registered()
    before = driver.core.stats().prefix_cache_hits_total
    driver.add("r", [*PREFIX[:21], 50, 51], max_tokens=2)
    driver.run()
    assert driver.core.stats().prefix_cache_hits_total - before == 20
    assert driver.core.stats().copied_blocks_total == 0


def test_other_tenants_and_prompt_logprobs_do_not_hit() -> None:
    driver = registered()
    driver.add("salted", [*PREFIX, 5], max_tokens=2, salt="other")
    driver.add("scored", [*PREFIX, 5], max_tokens=2, prompt_logprobs=0)
    driver.run()
    assert driver.core.stats().prefix_cache_hits_total == 0
    assert driver.prompt_logprob_positions["scored"] == list(range(1, 23))
    driver.register_prefix("mine", PREFIX, "tenant")
    driver.add("of the tenant", [*PREFIX, 5], max_tokens=2, salt="tenant")
    driver.run()
    assert driver.core.stats().prefix_cache_hits_total >= 20


@pytest.mark.parametrize("windows", WINDOWS)
def test_it_is_never_evicted_and_survives_a_reset(windows: tuple[int | None, ...]) -> None:
    driver = registered(windows=windows, num_blocks=len(windows) * 16)
    fill(driver)
    driver.scheduler.kv.reset_prefix_cache()
    driver.scheduler.check()
    before = driver.core.stats().prefix_cache_hits_total
    driver.add("r", [*PREFIX, 7], max_tokens=2)
    driver.add("full blocks", [*PREFIX[:20], 8], max_tokens=2)
    driver.run()
    assert driver.core.stats().prefix_cache_hits_total - before == 22 + 20


def test_unpinning_frees_the_memory_and_leaves_the_content_evictable() -> None:
    driver = registered(num_blocks=16)
    stats = driver.core.stats()
    assert (stats.num_used_blocks, stats.num_registered_blocks) == (6, 6)
    assert stats.num_stored_tokens == 22
    assert driver.scheduler.unregister_prefix("p") == 6
    driver.scheduler.check()
    stats = driver.core.stats()
    assert (stats.num_used_blocks, stats.num_registered_blocks, stats.num_cached_blocks) == (0, 0, 5)
    with pytest.raises(UserError, match="no prefix 'p'"):
        driver.scheduler.unregister_prefix("p")
    fill(driver)
    hits = driver.core.stats().prefix_cache_hits_total
    driver.add("r", [*PREFIX, 7], max_tokens=2)
    driver.run()
    assert driver.core.stats().prefix_cache_hits_total == hits


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_unpinning_under_requests_that_share_it(queue_depth: int) -> None:
    driver = registered(queue_depth=queue_depth)
    for index in range(3):
        driver.add(f"r{index}", [*PREFIX, 7 + index], max_tokens=12)
    for _ in range(3):
        driver.step()
    assert driver.scheduler.unregister_prefix("p") == 6
    driver.scheduler.check()
    driver.run()
    for index in range(3):
        assert driver.tokens[f"r{index}", 0] == generate_alone([*PREFIX, 7 + index], max_tokens=12)[0]


def test_prefixes_share_what_they_have_in_common() -> None:
    driver = registered()
    driver.register_prefix("longer", [*PREFIX, *prompt(10, start=60)])
    driver.run()
    assert driver.core.stats().num_registered_blocks == 5 + 1 + 3
    assert driver.scheduler.unregister_prefix("p") == 1
    driver.scheduler.check()
    hits = driver.core.stats().prefix_cache_hits_total
    driver.add("r", [*PREFIX, *prompt(10, start=60), 3], max_tokens=2)
    driver.run()
    assert driver.core.stats().prefix_cache_hits_total - hits == 32


@pytest.mark.parametrize("windows", WINDOWS)
def test_content_that_is_computed_twice_is_registered_once(windows: tuple[int | None, ...]) -> None:
    """Another request computed the same blocks at the same time: the registration keeps those that are in the index."""
    driver = CoreDriver(make_config(windows=windows, max_prefill_chunk=4, num_blocks=120))
    driver.add("twin", [*PREFIX[:7], *PREFIX[7:], 4], max_tokens=20)
    driver.step()
    driver.scheduler.kv.reset_prefix_cache()
    driver.register_prefix("p", PREFIX)
    driver.run()
    driver.scheduler.check()
    driver.add("r", [*PREFIX, 9], max_tokens=3)
    driver.run()
    assert driver.tokens["r", 0] == generate_alone([*PREFIX, 9], max_tokens=3)[0]


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_preemption_takes_no_registered_block_and_changes_no_token(queue_depth: int) -> None:
    driver = registered(num_blocks=17, max_num_seqs=4, queue_depth=queue_depth)
    for index in range(4):
        driver.add(f"r{index}", [*PREFIX, 7 + index], max_tokens=16)
    while driver.core.has_work:
        driver.step()
        driver.scheduler.check()
        assert driver.core.stats().num_registered_blocks == 6
    stats = driver.core.stats()
    assert stats.preemptions_total > 0
    for index in range(4):
        assert driver.tokens[f"r{index}", 0] == generate_alone([*PREFIX, 7 + index], max_tokens=16)[0]


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_parallel_samples_fork_behind_a_registered_prefix(queue_depth: int) -> None:
    driver = registered(queue_depth=queue_depth)
    driver.add("r", [*PREFIX, 7], n=3, temperature=1.0, max_tokens=8)
    driver.run()
    alone = generate_alone([*PREFIX, 7], n=3, temperature=1.0, max_tokens=8)
    assert [driver.tokens["r", index] for index in range(3)] == alone


def test_a_prefix_that_is_preempted_while_it_is_computed_is_registered_in_the_end() -> None:
    """Also when its one sample is in flight: the token comes back, and there is nothing to register."""
    for num_steps in range(1, 12):
        driver = CoreDriver(make_config(queue_depth=2, max_prefill_chunk=4, max_num_batched_tokens=64))
        scheduler = driver.scheduler
        driver.register_prefix("p", PREFIX)
        driver.add("other", prompt(4), max_tokens=30)
        for _ in range(num_steps):
            driver.step()
        plan = scheduler.schedule(driver.clock.now())
        if "p" in scheduler._requests and scheduler._requests["p"].sequences[0].blocks is not None:
            scheduler._admitter.preempt(PlanBuilder(0, 0), scheduler._requests["p"])
        scheduler.check()
        driver.core._in_flight.append(driver.executor.execute(plan))
        driver.run()
        assert scheduler.kv.is_registered("p")
        assert driver.core.stats().num_registered_blocks == 6


@pytest.mark.parametrize("num_steps", [0, 1, 3, 5])
def test_an_aborted_prefix_leaves_nothing(num_steps: int) -> None:
    driver = CoreDriver(make_config(queue_depth=2, max_prefill_chunk=4))
    driver.register_prefix("p", PREFIX)
    for _ in range(num_steps):
        driver.step()
    driver.abort("p")
    driver.run()
    assert driver.core.stats().num_registered_blocks == 0
    driver.register_prefix("p", PREFIX)
    driver.run()
    assert driver.scheduler.kv.is_registered("p")


# -- room -----------------------------------------------------------------------------------------------------------


def test_a_prefix_that_leaves_no_room_is_refused() -> None:
    driver = CoreDriver(make_config(num_blocks=7))
    driver.register_prefix("too large", prompt(28))
    driver.register_prefix("fits", prompt(23))
    driver.run()
    assert "too few" in driver.refused["too large"]
    assert driver.scheduler.kv.is_registered("fits")
    driver.add("goes on", [*prompt(23), 5], max_tokens=1)
    driver.add("other", prompt(3, start=8), max_tokens=2)
    driver.run()
    assert not {"goes on", "other"} & driver.refused.keys()
    driver.add("longer", prompt(5, start=9), max_tokens=2)
    driver.run()
    assert "registered prefixes hold 6 more" in driver.refused["longer"]


def test_a_prefix_may_not_take_the_room_of_those_that_were_accepted() -> None:
    driver = CoreDriver(make_config(num_blocks=12))
    driver.add("accepted", prompt(8), max_tokens=33)
    driver.register_prefix("p", PREFIX[:12])
    driver.step()
    assert "may need 10" in driver.refused["p"]
    driver.run()
    assert driver.finished["accepted", 0] is FinishReason.LENGTH
    driver.register_prefix("p", PREFIX[:12])
    driver.run()
    assert driver.scheduler.kv.is_registered("p")
    driver.add("accepted", prompt(8), max_tokens=33)
    driver.run()
    assert "KV blocks" in driver.refused["accepted"]


def test_a_request_need_not_find_room_for_what_it_shares() -> None:
    driver = registered(num_blocks=12)
    driver.add("shares", [*PREFIX, 5], max_tokens=22)
    driver.add("shares too", [*PREFIX, 6], max_tokens=22)
    driver.add("does not", prompt(5, start=9), max_tokens=20)
    driver.run()
    assert list(driver.refused) == []
    driver.add("shares and is too long", [*PREFIX, 5], max_tokens=23)
    driver.add("too long", prompt(5, start=9), max_tokens=21)
    driver.run()
    assert list(driver.refused) == ["shares and is too long", "too long"]
    assert set(driver.finished.values()) == {FinishReason.LENGTH}


def test_without_prefix_caching_there_are_no_registered_prefixes() -> None:
    driver = CoreDriver(make_config(enable_prefix_caching=False))
    driver.register_prefix("p", PREFIX)
    driver.run()
    assert "enable_prefix_caching" in driver.refused["p"]


def test_a_name_is_taken_once() -> None:
    driver = registered()
    driver.register_prefix("p", prompt(5))
    driver.run()
    assert "registered already" in driver.refused["p"]
