"""Sharing in flight: requests that arrive together with the same new prefix compute it once, and none is stuck."""

from __future__ import annotations

import pytest

from quire.kv_cache.manager import KVCacheManager
from tests.fakes.core import CoreDriver, generate_alone, make_config

SHARED = [(7 * i) % 90 + 1 for i in range(42)]
"""Ten full blocks of four tokens, and two tokens of the next."""
FULL = 40


def prompt(number: int, own: int = 5, shared: int = 42) -> list[int]:
    """A prompt that begins like all others and ends like none."""
    return SHARED[:shared] + [(number + 11 * i) % 90 + 1 for i in range(own)]


def stranger(length: int, start: int = 50) -> list[int]:
    return [(start + 13 * i) % 90 + 1 for i in range(length)]


def make_driver(**options) -> CoreDriver:  # type: ignore[no-untyped-def]
    options = {"num_blocks": 300, "max_num_seqs": 16, "max_num_batched_tokens": 1024, **options}
    return CoreDriver(make_config(**options), record=True)


def started(driver: CoreDriver) -> list[list[int]]:
    """Per step the sequences that started in it."""
    return [[new.seq_id for new in plan.new_sequences] for plan in driver.executor.plans]


def assert_as_alone(driver: CoreDriver, prompts: dict[str, list[int]], **params) -> None:  # type: ignore[no-untyped-def]
    for name, ids in prompts.items():
        alone = generate_alone(ids, **params)
        assert [driver.tokens[name, index] for index in range(len(alone))] == alone, name


@pytest.mark.parametrize("windows", [(None, None), (6, 6), (None, 6), (None, 6, 6)])
@pytest.mark.parametrize("queue_depth", [1, 2])
def test_sixteen_requests_compute_their_prefix_once(windows: tuple[int | None, ...], queue_depth: int) -> None:
    driver = make_driver(windows=windows, num_blocks=1000, queue_depth=queue_depth)
    prompts = {f"r{number}": prompt(number) for number in range(16)}
    for name, ids in prompts.items():
        driver.add(name, ids, max_tokens=4)
    driver.run()
    stats = driver.core.stats()
    assert stats.prefix_cache_hits_total == 15 * FULL
    assert stats.scheduled_tokens_total == FULL + 16 * (2 + 5 + 3)
    assert stats.prefix_cache_waits_total == 15
    # With two plans in flight the first step's result comes when the second is made already.
    assert [len(step) for step in started(driver)[: queue_depth + 1]] == [1, *[0] * (queue_depth - 1), 15]
    assert_as_alone(driver, prompts, max_tokens=4)


def test_no_request_is_deferred_when_caching_is_off() -> None:
    driver = make_driver(enable_prefix_caching=False)
    for number in range(16):
        driver.add(f"r{number}", prompt(number), max_tokens=2)
    driver.run()
    assert len(started(driver)[0]) == 16
    assert driver.core.stats().prefix_cache_waits_total == 0


def test_requests_that_share_nothing_pass() -> None:
    driver = make_driver()
    for name, ids in (
        ("a", prompt(1)),
        ("b", prompt(2)),
        ("x", stranger(30)),
        ("c", prompt(3)),
        ("y", stranger(9, start=60)),
    ):
        driver.add(name, ids, max_tokens=3)
    driver.run()
    assert started(driver)[:2] == [[0, 2, 4], [1, 3]]


@pytest.mark.parametrize(("shared", "waits"), [(3, 0), (4, 0), (7, 0), (8, 1), (42, 1)])
def test_one_shared_block_is_not_worth_a_step(shared: int, waits: int) -> None:
    driver = make_driver()
    driver.add("a", prompt(1, own=20, shared=shared), max_tokens=2)
    driver.add("b", prompt(2, own=20, shared=shared), max_tokens=2)
    driver.run()
    assert driver.core.stats().prefix_cache_waits_total == waits
    assert driver.core.stats().prefix_cache_hits_total == (shared // 4 * 4 if waits else 0)


@pytest.mark.parametrize(("salts", "hits"), [(("", ""), FULL), (("a", "a"), FULL), (("a", "b"), 0), (("", "a"), 0)])
def test_tenants_do_not_wait_for_one_another(salts: tuple[str, str], hits: int) -> None:
    driver = make_driver()
    for name, salt in zip("ab", salts, strict=True):
        driver.add(name, prompt(ord(name)), max_tokens=2, salt=salt)
    driver.run()
    stats = driver.core.stats()
    assert (stats.prefix_cache_waits_total, stats.prefix_cache_hits_total) == (int(hits > 0), hits)


@pytest.mark.parametrize("name", ["a", "b"])
def test_who_wants_prompt_logprobs_neither_waits_nor_is_waited_for(name: str) -> None:
    driver = make_driver()
    for each in "ab":
        driver.add(each, prompt(1), max_tokens=2, prompt_logprobs=0 if each == name else None)
    driver.run()
    assert started(driver)[0] == [0, 1]
    assert driver.core.stats().prefix_cache_waits_total == 0
    assert driver.prompt_logprob_positions[name] == list(range(1, 47))


def test_the_wait_ends_with_the_last_shared_block() -> None:
    """b shares 5 of a's 10 blocks, and a computes 2 in a step: b starts in the fourth step, before a's prompt ends."""
    driver = make_driver(max_prefill_chunk=8)
    driver.add("a", prompt(1), max_tokens=2)
    driver.add("b", prompt(2, shared=22), max_tokens=2)
    driver.run()
    assert started(driver)[:4] == [[0], [], [], [1]]
    assert driver.executor.plans[3].start_positions == [24, 20]
    assert driver.core.stats().prefix_cache_waits_total == 1


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_parallel_samples_lead_and_wait(queue_depth: int) -> None:
    driver = make_driver(queue_depth=queue_depth)
    prompts = {name: prompt(number) for number, name in enumerate("abc")}
    for name, ids in prompts.items():
        driver.add(name, ids, max_tokens=5, n=3, temperature=1.0)
    driver.run()
    assert started(driver)[:1] == [[0]]
    assert driver.core.stats().scheduled_tokens_total == FULL + 3 * 7 + 9 * 4
    assert_as_alone(driver, prompts, max_tokens=5, n=3, temperature=1.0)


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_when_the_leader_is_aborted_the_next_one_computes_the_rest(queue_depth: int) -> None:
    driver = make_driver(max_prefill_chunk=8, queue_depth=queue_depth)
    prompts = {name: prompt(number) for number, name in enumerate("abcd")}
    for name, ids in prompts.items():
        driver.add(name, ids, max_tokens=2)
    for _ in range(2):
        driver.step()
    assert driver.core.stats().num_waiting == 3
    driver.abort("a")
    driver.scheduler.check()
    del prompts["a"]
    driver.run()
    order = [seq_id for step in started(driver) for seq_id in step]
    assert order == [0, 1, 2, 3]
    computed = sum(count for plan in driver.executor.plans for count in plan.num_tokens)
    assert computed <= FULL + 8 * queue_depth + 3 * (7 + 1), "at most what was in flight is computed twice"
    assert_as_alone(driver, prompts, max_tokens=2)


def test_when_the_leading_sample_is_aborted_its_siblings_lead() -> None:
    driver = make_driver(max_prefill_chunk=8)
    driver.add("a", prompt(1), max_tokens=2, n=2, temperature=1.0)
    driver.add("b", prompt(2), max_tokens=2)
    driver.step()
    driver.abort("a", 0)
    driver.run()
    assert driver.core.stats().prefix_cache_waits_total == 2, "b waits again"
    assert [seq_id for step in started(driver) for seq_id in step] == [0, 1, 2]
    assert driver.tokens["a", 1] == generate_alone(prompt(1), max_tokens=2, n=2, temperature=1.0)[1]
    assert_as_alone(driver, {"b": prompt(2)}, max_tokens=2)


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_when_the_leader_is_preempted_it_leads_again(queue_depth: int) -> None:
    """The first request grows until the leader has to give its blocks up, in the middle of its prompt."""
    driver = make_driver(num_blocks=24, max_num_seqs=4, max_prefill_chunk=2, queue_depth=queue_depth)
    driver.add("first", stranger(20), max_tokens=60)
    while driver.core.stats().generation_tokens_total < 21:
        driver.step()
    prompts = {name: prompt(number) for number, name in enumerate("ab")}
    for name, ids in prompts.items():
        driver.add(name, ids, max_tokens=2)
    while not driver.core.stats().preemptions_total:
        driver.step()
        driver.scheduler.check()
    stats = driver.core.stats()
    assert (stats.num_preempted, stats.num_waiting, stats.prefix_cache_waits_total) == (1, 2, 1)
    driver.run()
    assert [name for name, _ in driver.finished] == ["first", "a", "b"]
    assert_as_alone(driver, prompts, max_tokens=2)


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_the_leader_may_end_with_its_first_token(queue_depth: int) -> None:
    driver = make_driver(queue_depth=queue_depth)
    prompts = {name: prompt(number) for number, name in enumerate("abc")}
    for name, ids in prompts.items():
        driver.add(name, ids, max_tokens=1)
    driver.run()
    assert driver.core.stats().scheduled_tokens_total == FULL + 3 * 7
    assert_as_alone(driver, prompts, max_tokens=1)


def test_a_reset_of_the_cache_ends_the_wait() -> None:
    """What the leader has yet to compute will never be hit: the blocks before it are forgotten."""
    driver = make_driver(max_prefill_chunk=8)
    driver.add("a", prompt(1), max_tokens=2)
    driver.add("b", prompt(2), max_tokens=2)
    driver.step()
    driver.scheduler.kv.reset_prefix_cache()
    driver.step()
    assert started(driver) == [[0], [1]]
    driver.run()
    assert_as_alone(driver, {"a": prompt(1), "b": prompt(2)}, max_tokens=2)


def test_rows_are_kept_for_those_that_wait() -> None:
    driver = make_driver(max_num_seqs=4)
    driver.add("a", prompt(1), max_tokens=9)
    driver.add("b", prompt(2), max_tokens=2, n=2)
    for number in range(3):
        driver.add(f"x{number}", stranger(5, start=number), max_tokens=9)
    driver.run()
    assert started(driver)[:2] == [[0, 3], [1]], "two of the four rows are b's"


def test_blocks_are_kept_for_those_that_wait() -> None:
    driver = make_driver(num_blocks=40)
    driver.add("a", prompt(1), max_tokens=9)
    driver.add("b", prompt(2), max_tokens=9)
    for number in range(5):
        driver.add(f"x{number}", stranger(21, start=number), max_tokens=2)
    driver.run()
    assert started(driver)[0] == [0, 2, 3], "of 40 blocks 12 are a's and 12 set aside for b: each of the others needs 6"
    assert started(driver)[1][0] == 1
    assert driver.core.stats().preemptions_total == 0


def test_only_prompts_that_fit_the_step_pass() -> None:
    """A long one would take the budget of the steps to come, before those that wait."""
    driver = make_driver(max_num_batched_tokens=64)
    driver.add("a", prompt(1), max_tokens=2)
    driver.add("b", prompt(2), max_tokens=2)
    driver.add("long", stranger(100), max_tokens=2)
    driver.add("short", stranger(9), max_tokens=2)
    driver.run()
    assert started(driver)[:2] == [[0], [1, 2]]


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_newcomers_do_not_starve_those_that_wait(queue_depth: int) -> None:
    """However many arrive and pass, the wait is as long as the leader's prompt takes."""
    driver = make_driver(max_num_seqs=6, max_num_batched_tokens=32, max_prefill_chunk=8, queue_depth=queue_depth)
    for number in range(3):
        driver.add(f"r{number}", prompt(number), max_tokens=4)
    for number in range(60):
        driver.add(f"x{number}", stranger(6, start=number), max_tokens=4)
        driver.step()
    starts = {seq_id: step for step, seq_ids in enumerate(started(driver)) for seq_id in seq_ids}
    assert max(starts[1], starts[2]) <= FULL // 8 + queue_depth
    assert min(starts[seq_id] for seq_id in (3, 4)) < starts[1], "some did pass"
    driver.run()


def test_a_long_prompt_is_waited_for_without_looking_it_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = []
    original = KVCacheManager.match_prefix
    monkeypatch.setattr(
        KVCacheManager, "match_prefix", lambda self, *args: looked_up.append(1) or original(self, *args)
    )
    driver = make_driver(max_num_seqs=4, max_prefill_chunk=4)
    for number in range(50):
        driver.add(f"r{number}", prompt(number), max_tokens=2)
    for _ in range(8):
        driver.step()
    assert len(looked_up) == 4, "one leads and three wait; the others have no row to wait for"
    driver.run()


def test_who_finds_no_room_is_not_looked_up_again_until_there_is_more(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = []
    original = KVCacheManager.match_prefix
    monkeypatch.setattr(
        KVCacheManager, "match_prefix", lambda self, *args: looked_up.append(1) or original(self, *args)
    )
    driver = make_driver(num_blocks=30)
    driver.add("a", stranger(60), max_tokens=30)
    driver.add("b", stranger(61, start=4), max_tokens=30)
    driver.run()
    assert len(looked_up) == 3, "a; b, which does not fit yet; and b when a has ended"
    assert_as_alone(driver, {"a": stranger(60), "b": stranger(61, start=4)}, max_tokens=30)


def test_a_request_that_found_no_room_is_looked_at_again_when_it_shrinks() -> None:
    driver = make_driver(num_blocks=30, max_num_seqs=4)
    driver.add("a", stranger(90), max_tokens=6)
    driver.add("b", stranger(20, start=4), n=3, temperature=1.0, max_tokens=20)
    driver.add("c", stranger(3, start=9), max_tokens=2)
    driver.step()
    assert driver.core.stats().num_running == 1
    driver.abort("b", 1)
    driver.abort("b", 2)
    driver.step()
    assert driver.core.stats().num_running == 3
    driver.run()


def test_preempted_requests_are_counted_behind_those_that_wait() -> None:
    """A request that deferred and is preempted goes behind the one that it passed."""
    driver = make_driver(num_blocks=30, max_num_seqs=8, max_prefill_chunk=2)
    driver.add("first", stranger(6), max_tokens=60)
    driver.add("a", prompt(1), max_tokens=2)
    driver.add("b", prompt(2), max_tokens=2)
    driver.add("x", stranger(2, start=7), n=3, temperature=1.0, max_tokens=30)
    while not driver.core.stats().preemptions_total:
        driver.step()
        driver.scheduler.check()
    stats = driver.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_preempted) == (2, 2, 1)
    driver.run()
    assert driver.core.stats().num_preempted == 0
    assert_as_alone(driver, {"a": prompt(1), "b": prompt(2)}, max_tokens=2)
    assert_as_alone(driver, {"x": stranger(2, start=7)}, n=3, temperature=1.0, max_tokens=30)
