"""Preemption by swapping: what moves, when, and that no token changes (the fake executor moves real contents)."""

from __future__ import annotations

from collections import Counter

import pytest

from quire.kv_cache.block_table import BlockAllocation, BlockTable
from quire.kv_cache.host_pool import Footprint
from quire.kv_cache.manager import KVCacheManager
from quire.request import FinishReason
from quire.scheduler.preemption import PreemptionCosts, choice
from quire.step import StepPlan
from tests.fakes.core import CoreDriver, generate_alone, make_config


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + 7 * i) % 90 + 1 for i in range(length)]


def make_driver(
    *,
    num_blocks: int = 14,
    num_host_blocks: int = 200,
    mode: str = "swap",
    costs: PreemptionCosts | None = None,
    **options: int | bool,
) -> CoreDriver:
    config = make_config(
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        preemption_mode=mode,
        **{"max_num_seqs": 6, "enable_prefix_caching": False, "windows": (None,), **options},
    )
    return CoreDriver(config, costs=costs, record=True)


def step_until_swapped(driver: CoreDriver) -> StepPlan:
    """Step until a request is swapped out; returns that plan."""
    for _ in range(500):
        driver.step()
        driver.scheduler.check()
        if driver.core.stats().num_swapped:
            return next(plan for plan in reversed(driver.executor.plans) if plan.swap_out)
    raise AssertionError("no request was swapped out")


@pytest.mark.parametrize("queue_depth", [1, 2])
@pytest.mark.parametrize("windows", [(None,), (None, 6), (5, 5)])
def test_nothing_is_recomputed_and_no_token_changes(queue_depth: int, windows: tuple[int | None, ...]) -> None:
    num_blocks = {(None,): 14, (None, 6): 22, (5, 5): 6}[windows]
    driver = make_driver(num_blocks=num_blocks, queue_depth=queue_depth, windows=windows, max_prefill_chunk=4)
    prompts = {name: prompt(8, start=i) for i, name in enumerate("abcd")}
    for name, ids in prompts.items():
        driver.add(name, ids, max_tokens=24)
    driver.run()
    stats = driver.core.stats()
    assert stats.preemptions_total == stats.swap_preemptions_total > 0
    assert stats.recomputed_tokens_total == 0
    assert stats.scheduled_tokens_total == 4 * (8 + 23), "each token once"
    assert stats.swapped_out_blocks_total == stats.swapped_in_blocks_total > 0
    moved = stats.swapped_out_blocks_total + stats.swapped_in_blocks_total
    assert stats.swapped_bytes_total == moved * driver.scheduler.kv.block_bytes
    assert list(driver.finished) == [(name, 0) for name in "abcd"]
    for name, ids in prompts.items():
        assert driver.tokens[name, 0] == generate_alone(ids, max_tokens=24)[0]


def test_swapped_in_sequences_run_in_the_next_step() -> None:
    driver = make_driver()
    for i, name in enumerate("abc"):
        driver.add(name, prompt(8, start=i), max_tokens=24)
    driver.run()
    plans = driver.executor.plans
    returned = [number for number, plan in enumerate(plans) if plan.swap_in]
    assert returned
    for number in returned:
        rows = {new.seq_id for new in plans[number].new_sequences}
        assert not rows & set(plans[number].seq_ids)
        assert rows <= set(plans[number + 1].seq_ids)
        filled = {block for _, block in plans[number].swap_in}
        assert filled == {b for new in plans[number].new_sequences for table in new.block_ids for b in table}


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_siblings_move_together_and_share_what_they_shared(queue_depth: int) -> None:
    driver = make_driver(num_blocks=22, queue_depth=queue_depth)
    driver.add("first", prompt(12), max_tokens=50)
    driver.add("trio", prompt(17, start=4), n=3, temperature=1.0, max_tokens=16)
    plan = step_until_swapped(driver)
    assert set(plan.released) >= {1, 2, 3}
    swapped = [sequence.swapped for sequence in driver.scheduler._requests["trio"].sequences]
    held = [block for blocks in swapped for block in blocks.tables[0]]
    assert len(plan.swap_out) == len(set(held)) == len(held) - 2 * 4, "the prompt's four blocks are shared by three"
    driver.run()
    assert driver.core.stats().recomputed_tokens_total == 0
    expected = generate_alone(prompt(17, start=4), n=3, temperature=1.0, max_tokens=16)
    assert [driver.tokens["trio", i] for i in range(3)] == expected


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_every_size_of_pool_with_siblings_whose_step_is_taken_back(
    queue_depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one step a sibling got a block, or a copy of one, and the next found none: what is saved is as before."""
    undone: Counter[str] = Counter()
    rollback = KVCacheManager.rollback

    def count(self: KVCacheManager, blocks: BlockTable, growth: BlockAllocation) -> None:
        undone["copies"] += len(growth.copies)
        undone["new blocks"] += len(growth.new_blocks[0])
        rollback(self, blocks, growth)

    monkeypatch.setattr(KVCacheManager, "rollback", count)
    requests = {"first": (prompt(4), {"max_tokens": 40}), "trio": (prompt(17, start=4), {"n": 3, "max_tokens": 14})}
    alone = {name: generate_alone(ids, temperature=1.0, **params) for name, (ids, params) in requests.items()}
    for num_blocks in range(16, 28):
        driver = make_driver(num_blocks=num_blocks, queue_depth=queue_depth, max_prefill_chunk=1, windows=(None, None))
        for name, (ids, params) in requests.items():
            driver.add(name, ids, temperature=1.0, **params)
            for _ in range(20):
                driver.step()
        driver.run()
        assert {name: [driver.tokens[name, i] for i in range(len(alone[name]))] for name in alone} == alone
        stats = driver.core.stats()
        computed = sum(plan.total_tokens for plan in driver.executor.plans)
        assert computed == 4 + 39 + 17 + 3 * 13
        assert stats.recomputed_tokens_total == 0
    assert min(undone["copies"], undone["new blocks"]) > 0, undone


def test_a_full_host_pool_hands_over_to_recomputation() -> None:
    driver = make_driver(num_host_blocks=4)
    prompts = {name: prompt(8, start=i) for i, name in enumerate("abcd")}
    for name, ids in prompts.items():
        driver.add(name, ids, max_tokens=24)
    driver.run()
    stats = driver.core.stats()
    assert 0 < stats.swap_preemptions_total < stats.preemptions_total
    assert stats.recomputed_tokens_total > 0
    for name, ids in prompts.items():
        assert driver.tokens[name, 0] == generate_alone(ids, max_tokens=24)[0]


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_no_new_request_starts_while_a_swapped_one_waits(queue_depth: int) -> None:
    driver = make_driver(num_blocks=12, queue_depth=queue_depth)
    for i, name in enumerate("abc"):
        driver.add(name, prompt(8, start=i), max_tokens=24)
    plan = step_until_swapped(driver)
    victim = plan.released[-1]
    driver.add("late", prompt(2, start=50), max_tokens=2)
    driver.run()
    order = [new.seq_id for plan in driver.executor.plans for new in plan.new_sequences]
    assert order.index(3) > order.index(victim, order.index(victim) + 1)


def test_a_sample_in_flight_is_waited_for() -> None:
    """However many plans are made ahead: a row needs its tokens, though its blocks are safe."""
    driver = make_driver(num_blocks=4, num_host_blocks=8)
    scheduler = driver.scheduler
    for seq_id, name in enumerate("abc"):
        driver.add(name, prompt(4, start=seq_id), max_tokens=4)
    plans = [scheduler.schedule(0.0) for _ in range(2)]
    assert [plan.seq_ids for plan in plans] == [[0, 1, 2], [0, 1]]
    assert len(plans[1].swap_out) == 1
    scheduler.abort("b")
    plans.append(scheduler.schedule(0.0))
    assert plans[-1].seq_ids == [0]
    assert not plans[-1].swap_in, "the third sequence's first token is not known"
    for plan in plans:
        scheduler.update(driver.executor.execute(plan).result(), 0.0)
        scheduler.check()
    plan = scheduler.schedule(0.0)
    assert [len(new.token_ids) for new in plan.new_sequences] == [5]
    assert len(plan.swap_in) == 1


def test_the_end_may_come_while_a_sequence_is_swapped() -> None:
    """Its last sample was in flight: the value ends it, and the host's blocks are free."""
    driver = make_driver(num_blocks=4, num_host_blocks=8)
    scheduler = driver.scheduler
    last = generate_alone(prompt(4, start=2), max_tokens=1)[0][0]
    for seq_id, name in enumerate("abc"):
        driver.add(name, prompt(4, start=seq_id), max_tokens=4, stop_token_ids=[last] if name == "c" else None)
    for plan in [scheduler.schedule(0.0) for _ in range(2)]:
        scheduler.update(driver.executor.execute(plan).result(), 0.0)
        scheduler.check()
    assert scheduler.stats().num_used_host_blocks == 0
    assert scheduler.stats().num_preempted == 0
    driver.run()


@pytest.mark.parametrize("index", [None, 1])
def test_abort_frees_host_blocks_at_once(index: int | None) -> None:
    driver = make_driver(num_blocks=22)
    driver.add("first", prompt(12), max_tokens=50)
    driver.add("trio", prompt(17, start=4), n=3, temperature=1.0, max_tokens=16)
    plan = step_until_swapped(driver)
    used = driver.core.stats().num_used_host_blocks
    assert used == len(plan.swap_out)
    driver.abort("trio", index)
    driver.scheduler.check()
    left = driver.core.stats().num_used_host_blocks
    assert left == 0 if index is None else 0 < left < used
    driver.run()
    expected = generate_alone(prompt(17, start=4), n=3, temperature=1.0, max_tokens=16)
    if index is not None:
        assert [driver.tokens["trio", i] for i in (0, 2)] == [expected[0], expected[2]]


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_request_that_is_swapped_before_it_forks(is_aborted: bool) -> None:
    """Only the leader has blocks. If it is aborted its sibling begins from nothing; else they fork after the return."""
    driver = make_driver(num_blocks=14, max_prefill_chunk=1)
    driver.add("first", prompt(4), max_tokens=44)
    for _ in range(24):
        driver.step()
    driver.add("pair", prompt(20, start=4), n=2, temperature=1.0, max_tokens=8)
    step_until_swapped(driver)
    leader, sibling = driver.scheduler._requests["pair"].sequences
    assert leader.swapped is not None
    assert sibling.swapped is None
    assert 0 < leader.num_computed_tokens < 20
    if is_aborted:
        driver.abort("pair", 0)
        driver.scheduler.check()
        assert driver.core.stats().num_used_host_blocks == driver.core.stats().num_swapped == 0
    driver.run()
    expected = generate_alone(prompt(20, start=4), n=2, temperature=1.0, max_tokens=8)
    assert driver.tokens["pair", 1] == expected[1]
    assert driver.core.stats().swapped_in_blocks_total == (0 if is_aborted else 4)
    if not is_aborted:
        assert driver.tokens["pair", 0] == expected[0]
        assert driver.core.stats().recomputed_tokens_total == 0


def test_what_is_still_cached_is_not_copied_back_and_comes_to_be_cached_again() -> None:
    driver = make_driver(enable_prefix_caching=True)
    prompts = {name: prompt(8, start=i) for i, name in enumerate("abcd")}
    for name, ids in prompts.items():
        driver.add(name, ids, max_tokens=24)
    driver.run()
    stats = driver.core.stats()
    assert 0 < stats.swapped_in_blocks_total < stats.swapped_out_blocks_total
    hits = stats.prefix_cache_hits_total
    driver.add("again", [*prompts["d"], *driver.tokens["d", 0]], max_tokens=2)
    driver.run()
    assert driver.core.stats().prefix_cache_hits_total - hits == 28, "all full blocks whose keys were computed"


def test_what_was_copied_back_can_be_hit_from_the_next_step_on() -> None:
    driver = make_driver(enable_prefix_caching=True, num_blocks=13)
    for i, name in enumerate("abc"):
        driver.add(name, prompt(8, start=i), max_tokens=26)
    num_checked = 0
    while driver.core.has_work:
        driver.step()
        plan = driver.executor.plans[-1]
        for new in plan.new_sequences if plan.swap_in else []:
            request = driver.scheduler._requests["abc"[new.seq_id]]
            (sequence,) = request.sequences
            num_full = sequence.num_computed_tokens // 4 * 4
            found = driver.scheduler.kv.match_prefix(sequence.chain, sequence.token_ids, num_full)
            assert found == num_full
            num_checked += 1
    assert num_checked > 0


def test_the_reset_of_the_cache_does_not_touch_what_is_swapped() -> None:
    driver = make_driver(enable_prefix_caching=True)
    prompts = {name: prompt(8, start=i) for i, name in enumerate("abcd")}
    for name, ids in prompts.items():
        driver.add(name, ids, max_tokens=24)
    step_until_swapped(driver)
    driver.scheduler.kv.reset_prefix_cache()
    driver.scheduler.check()
    driver.run()
    for name, ids in prompts.items():
        assert driver.tokens[name, 0] == generate_alone(ids, max_tokens=24)[0]
        assert driver.finished[name, 0] is FinishReason.LENGTH


def test_a_preempted_request_that_waits_for_a_prefix_is_not_passed() -> None:
    """Two with one prefix were preempted and recompute; the second waits for the first, and a newcomer for both."""
    driver = make_driver(num_blocks=16, mode="recompute", num_host_blocks=0, enable_prefix_caching=True)
    driver.add("old", prompt(4, start=60), max_tokens=60)
    for _ in range(16):
        driver.step()
    shared = prompt(16)
    for name in ("leader", "follower"):
        driver.add(name, [*shared, len(name)], max_tokens=20)
    for _ in range(30):
        driver.step()
    assert driver.core.stats().num_preempted == 2
    waits = driver.core.stats().prefix_cache_waits_total
    driver.abort("old")
    driver.scheduler.kv.reset_prefix_cache()
    driver.add("newcomer", prompt(2, start=50), max_tokens=2)
    num_plans = len(driver.executor.plans)
    driver.run()
    assert driver.core.stats().prefix_cache_waits_total == waits + 1
    starts = [new.seq_id for plan in driver.executor.plans[num_plans:] for new in plan.new_sequences]
    assert starts == [1, 2, 3]


def test_the_choice_depends_on_costs_alone() -> None:
    costs = PreemptionCosts(seconds_per_block=1.0, seconds_per_token=0.5)
    cheaper = choice("auto", costs)
    assert cheaper(Footprint(4, 3, 0), 15)
    assert not cheaper(Footprint(4, 3, 0), 14), "equal: recompute, which takes no host block"
    assert not cheaper(Footprint(4, 4, 0), 15)
    assert not choice("recompute", costs)(Footprint(1, 0, 0), 1000)
    assert choice("swap", None)(Footprint(1000, 1000, 0), 1)


@pytest.mark.parametrize(("seconds_per_token", "swaps"), [(0.1, False), (10.0, True)])
def test_auto_takes_the_cheaper_way(seconds_per_token: float, swaps: bool) -> None:
    driver = make_driver(mode="auto", costs=PreemptionCosts(1.0, seconds_per_token))
    for i, name in enumerate("abcd"):
        driver.add(name, prompt(8, start=i), max_tokens=24)
    driver.run()
    stats = driver.core.stats()
    assert stats.preemptions_total > 1
    assert stats.swap_preemptions_total == (stats.preemptions_total if swaps else 0)


def test_auto_counts_blocks_that_others_hold_as_free() -> None:
    """Two requests share six of the seven blocks of a prompt: what the younger one would recompute is little, unless
    the other one were not there."""
    shared = prompt(24)
    for other, swaps in (([*shared, 3], 0), (prompt(25, start=40), 1)):
        driver = make_driver(
            num_blocks=18,
            mode="auto",
            enable_prefix_caching=True,
            costs=PreemptionCosts(seconds_per_block=1.0, seconds_per_token=0.6),
        )
        driver.add("older", other, max_tokens=30)
        driver.step()
        driver.add("younger", [*shared, 5], max_tokens=30)
        while not driver.core.stats().preemptions_total:
            driver.step()
        assert driver.core.stats().swap_preemptions_total == swaps
        driver.run()
