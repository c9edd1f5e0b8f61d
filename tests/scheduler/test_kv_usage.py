"""The accounts of KV memory: small cases by hand. After every step of every other test a ledger counts slot by slot."""

from __future__ import annotations

import pytest

from quire.stats import EngineStats, shares
from tests.fakes.core import CoreDriver, make_config


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


def test_the_ledger_sees_what_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin would notice an account that is wrong by one slot, in any of its parts."""
    for name in ("num_wasted_slots", "num_reserved_slots"):
        driver = CoreDriver(make_config(queue_depth=2))
        driver.add("r", prompt(10), max_tokens=5)
        with monkeypatch.context() as patch:
            patch.setattr(f"quire.scheduler.kv_usage.{name}", lambda *_: 3)
            with pytest.raises(AssertionError):
                driver.step()
