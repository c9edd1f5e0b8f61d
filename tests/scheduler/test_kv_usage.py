"""The accounts of KV memory: small cases by hand. After every step of every other test a ledger counts slot by slot."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.manager import KVCacheManager
from quire.kv_cache.spec import AttentionSpec, LayerSpec, SlidingWindowSpec, StateSpec
from quire.kv_cache.stats import EngineStats, shares
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.step import StepPlan, StepResult
from tests.fakes.core import SCHEDULER, CoreDriver, make_config
from tests.fakes.ledger import SlotLedger


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + 7 * i) % 90 + 1 for i in range(length)]


def slots(stats: EngineStats) -> tuple[int, int, int, int]:
    """(used blocks, stored, reserved, wasted)"""
    return stats.num_used_blocks, stats.num_stored_tokens, stats.num_reserved_slots, stats.num_wasted_slots


@pytest.mark.parametrize(("windows", "groups"), [((None, None), 1), ((None, 6, 6), 3)])
def test_the_ends_of_last_blocks_are_wasted_once(windows: tuple[int | None, ...], groups: int) -> None:
    driver = CoreDriver(make_config(windows=windows))
    driver.add("r", prompt(10), n=3, temperature=1.0, max_tokens=5)
    driver.step()
    assert slots(driver.core.stats()) == (3 * groups, 10 * groups, 0, 2 * groups), "the last block has three owners"
    driver.step()
    stats = driver.core.stats()
    wasted = 3 * groups
    assert slots(stats) == (stats.num_used_blocks, stats.num_used_blocks * 4 - wasted, 0, wasted), "eleven of twelve"
    driver.run()
    assert slots(driver.core.stats()) == (0, 0, 0, 0)


def test_slots_of_steps_in_flight_are_reserved() -> None:
    driver = CoreDriver(make_config(queue_depth=2, max_prefill_chunk=6))
    driver.add("r", prompt(10), max_tokens=5)
    driver.step()
    assert slots(driver.core.stats()) == (3, 6, 4, 2), "the second step computes four tokens"
    driver.step()
    assert slots(driver.core.stats()) == (3, 10, 1, 1)
    driver.add("other", prompt(3, start=5), max_tokens=5)
    driver.step()
    assert slots(driver.core.stats()) == (4, 11, 4, 1)
    driver.abort("r")
    assert slots(driver.core.stats()) == (1, 0, 3, 1), "slots in flight for an aborted request are no sequence's"
    driver.run()


@pytest.mark.parametrize("prompt_length", [10, 12])
def test_what_is_in_flight_when_sequences_fork_is_reserved_once(prompt_length: int) -> None:
    """Also when the one that computes it is aborted: its children own the slots then."""
    driver = CoreDriver(make_config(queue_depth=2, max_prefill_chunk=6))
    driver.add("r", prompt(prompt_length), n=3, temperature=1.0, max_tokens=5)
    driver.step()
    expected = (3, 6, prompt_length - 6, 12 - prompt_length)
    assert slots(driver.core.stats()) == expected
    assert driver.core.stats().num_logical_blocks == 9
    driver.abort("r", 0)
    assert slots(driver.core.stats()) == expected
    assert driver.core.stats().num_logical_blocks == 6
    driver.run()


def test_saved_blocks_are_those_of_the_tables_that_are_not_there() -> None:
    driver = CoreDriver(make_config(), record=True)
    driver.add("a", prompt(9), n=3, temperature=1.0, max_tokens=6)
    driver.step()
    stats = driver.core.stats()
    assert (stats.num_logical_blocks, stats.num_used_blocks, stats.num_shared_blocks) == (9, 3, 3)
    assert shares(stats)["kv_cache_sharing"] == 6 / 9
    driver.add("b", [*prompt(9), 3], max_tokens=6)  # hits two of a's blocks
    driver.step()
    stats = driver.core.stats()
    assert (stats.num_logical_blocks, stats.num_used_blocks, stats.num_shared_blocks) == (12, 6, 2)
    assert shares(stats)["kv_cache_sharing"] == 6 / 12
    driver.run()
    assert driver.core.stats().num_logical_blocks == 0


def test_cached_blocks_are_not_used_blocks() -> None:
    driver = CoreDriver(make_config())
    driver.add("a", prompt(12), max_tokens=1)
    driver.run()
    stats = driver.core.stats()
    assert stats.num_cached_blocks == 3
    assert slots(stats) == (0, 0, 0, 0)
    assert stats.num_logical_blocks == 0


def test_shares_of_nothing_are_zero() -> None:
    assert set(shares(EngineStats()).values()) == {0.0}


def test_shares_add_up() -> None:
    stats = EngineStats(
        block_size=16,
        num_blocks=100,
        num_used_blocks=10,
        num_logical_blocks=25,
        num_stored_tokens=120,
        num_reserved_slots=24,
        num_wasted_slots=16,
        prefix_cache_queries_total=50,
        prefix_cache_hits_total=20,
    )
    assert shares(stats) == {
        "kv_cache_usage": 0.1,
        "kv_cache_stored": 0.75,
        "kv_cache_reserved": 0.15,
        "kv_cache_waste": 0.1,
        "kv_cache_sharing": 0.6,
        "prefix_cache_hit_rate": 0.4,
    }


def test_bytes_of_a_block_are_those_of_the_layout() -> None:
    stats = CoreDriver(make_config(windows=(None, 6, 6), block_size=4)).core.stats()
    # Groups of one layer each; float32 keys and values of one head of 8.
    assert stats.block_bytes == 4 * 2 * 8 * 4


LAYOUTS = {
    "narrow and wide": [narrow := AttentionSpec(2, 8, 8, 4), AttentionSpec(8, 8, 8, 4)],
    "a wide window": [narrow, SlidingWindowSpec(8, 8, 8, 4, window=24)],
    "a narrow window": [AttentionSpec(8, 8, 8, 4), SlidingWindowSpec(2, 8, 8, 4, window=70)],
}


def make_scheduler(specs: list[LayerSpec], block_size: int, **options: object) -> Scheduler:
    groups, layers_per_group = group_layers(specs, block_size)
    layout = KVCacheLayout(block_size, 200, groups, layers_per_group)
    return Scheduler(replace(SCHEDULER, **options), KVCacheManager(layout, enable_prefix_caching=True))  # type: ignore[arg-type]


def request(name: str, prompt: list[int], n: int = 1) -> EngineRequest:
    params = SamplingParams(n=n, temperature=1.0, max_tokens=90, ignore_eos=True)
    return EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, max_tokens=90, seed=1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_with_block_sizes_of_their_own(layout: str) -> None:
    """Blocks of 16 and of 64 tokens; every slot is counted after every plan and every update."""
    scheduler = make_scheduler(LAYOUTS[layout], 16, max_num_batched_tokens=60)
    kv = scheduler.kv
    assert sorted(kv.groups.sizes) == [16, 64]
    ledger = SlotLedger(*kv.groups.sizes)
    scheduler.add_request(request("a", prompt(100), n=2), 0.0)
    scheduler.add_request(request("b", [*prompt(100)[:80], 1, 2, 3]), 0.0)
    scheduler.add_request(request("c", prompt(33, start=7)), 0.0)
    in_flight: deque[StepPlan] = deque()
    for step in range(70):
        plan = scheduler.schedule(0.0)
        if plan is not None:
            in_flight.append(plan)
            ledger.follow(plan)
            ledger.check(scheduler)
        if len(in_flight) == 2 or plan is None:
            plan = in_flight.popleft()
            scheduler.update(StepResult(plan.step_id, [[1 + step % 90] for _ in plan.sample_seq_ids]), 0.0)
            stats = ledger.check(scheduler)
            assert stats.num_wasted_slots < sum(len(s.blocks.tables) * 64 for s in scheduler._running.sequences)
            assert sum(list(shares(stats).values())[1:4]) == pytest.approx(1.0)
    assert stats.num_used_blocks > 8


def test_states_have_one_slot_that_is_stored() -> None:
    state = StateSpec(num_bytes=2 * 16 * 8 * 4)
    scheduler = make_scheduler([AttentionSpec(1, 8, 8, 4), state], 16)
    kv, (_, tokens) = scheduler.kv, scheduler.kv.token_groups[0]
    scheduler.add_request(request("a", prompt(30)), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    num_blocks = -(-30 // tokens)
    assert slots(scheduler.stats()) == (num_blocks + 1, 1, 30, num_blocks * tokens - 30)
    scheduler.update(StepResult(plan.step_id, [[5]]), 0.0)
    assert slots(scheduler.stats()) == (num_blocks + 1, 31, 0, num_blocks * tokens - 30)
    assert kv.pool.num_used_of == [num_blocks, 1]


def test_the_snapshot_counts_in_blocks_of_each_group() -> None:
    scheduler = make_scheduler(LAYOUTS["narrow and wide"], 16, max_num_batched_tokens=200)
    scheduler.add_request(request("a", prompt(100)), 0.0)
    scheduler.schedule(0.0)
    snapshot = scheduler.snapshot(0.0)
    (sequence,) = snapshot.requests[0].sequences
    assert snapshot.block_sizes == [64, 16]
    assert [len(table) for table in sequence.tables] == [2, 7]
    assert (sequence.num_stored_tokens, sequence.num_filled_slots) == (100, 36)


def test_the_ledger_sees_what_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin would notice an account that is wrong by one slot, in any of its parts."""
    for name in ("num_wasted_slots", "num_reserved_slots"):
        driver = CoreDriver(make_config(queue_depth=2))
        driver.add("r", prompt(10), max_tokens=5)
        with monkeypatch.context() as patch:
            patch.setattr(f"quire.scheduler.kv_usage.{name}", lambda *_: 3)
            with pytest.raises(AssertionError):
                driver.step()
