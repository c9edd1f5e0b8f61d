"""Prefixes that come from host memory and from disk, driven through the engine core with a disk that can fail."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import initialize, rule

from quire.kv_cache.connectors.offload import RETRY
from quire.scheduler.gates import LOAD_SECONDS
from tests.fakes.core import CoreDriver, generate_alone, make_config
from tests.fakes.disk import FakeDisk
from tests.fakes.transfers import copies, disk_orders
from tests.machines import run_machine
from tests.scheduler.test_state_machine import ENGINES, EngineMachine, engine_config

PROMPT = [(7 * i) % 90 + 1 for i in range(41)]
"""Ten full blocks of four tokens, all but the last one's hits."""


def start(disk: FakeDisk, *, num_host_blocks: int = 40, **options) -> CoreDriver:  # type: ignore[no-untyped-def]
    return CoreDriver(make_config(num_host_blocks=num_host_blocks, offload=True, **options), disk=disk)


def generate(driver: CoreDriver, name: str, prompt: list[int] = PROMPT, **params) -> list[int]:  # type: ignore[no-untyped-def]
    driver.add(name, prompt, **params)
    driver.run()
    return driver.tokens[name, 0]


def cached_tokens(driver: CoreDriver) -> int:
    return driver.core.stats().prefix_cache_hits_total


def filled(**options) -> FakeDisk:  # type: ignore[no-untyped-def]
    """A disk that an engine left behind which had computed PROMPT."""
    disk = FakeDisk()
    driver = start(disk, **options)
    generate(driver, "first")
    driver.core.shutdown()
    return disk


@pytest.mark.parametrize("queue_depth", [1, 2])
@pytest.mark.parametrize("windows", [(None,), (None, 7), (5, 5), (None, 5, 5)])
def test_a_restarted_engine_hits_what_the_one_before_computed(
    queue_depth: int, windows: tuple[int | None, ...]
) -> None:
    options = {"queue_depth": queue_depth, "windows": windows}
    disk = FakeDisk(filled(**options).files, delay=3)
    driver = start(disk, **options)
    assert generate(driver, "again") == generate_alone(PROMPT)[0]
    assert cached_tokens(driver) == 40
    stats = driver.core.stats()
    assert stats.disk_cache_hit_blocks_total == stats.offload_loaded_blocks_total == disk.num_loads > 0
    assert stats.host_cache_hit_blocks_total == 0
    assert stats.offload_loaded_bytes_total == disk.num_loads * driver.scheduler.kv.block_bytes


def test_all_that_was_computed_is_stored_when_the_last_request_ends() -> None:
    disk = FakeDisk()
    driver = start(disk)
    driver.add("r", PROMPT, max_tokens=1)
    while driver.scheduler.has_requests:
        driver.step()
    # The engine takes no further step and is not shut down.
    assert len(disk.files) == 10


def test_what_left_the_device_comes_back_from_the_host() -> None:
    disk = FakeDisk()
    driver = start(disk, num_blocks=16, num_host_blocks=100)
    expected = generate(driver, "first")
    generate(driver, "other", [(5 * i) % 89 + 1 for i in range(50)])
    assert driver.core.stats().evictions_total >= 10
    before = cached_tokens(driver)
    assert generate(driver, "again") == expected
    assert cached_tokens(driver) - before == 40
    stats = driver.core.stats()
    assert stats.host_cache_hit_blocks_total > 0
    assert stats.offload_loaded_blocks_total == 0


def test_a_block_that_fails_is_computed_with_all_behind_it() -> None:
    files = filled().files
    bad = list(files)[4]
    disk = FakeDisk(files, fails=lambda key: key == bad)
    driver = start(disk)
    assert generate(driver, "again") == generate_alone(PROMPT)[0]
    assert cached_tokens(driver) == 16
    stats = driver.core.stats()
    assert stats.offload_load_failures_total == 1
    assert stats.offload_loaded_blocks_total == 9
    # It is computed once and then cached: no request loads the file again.
    assert generate(driver, "third") == generate_alone(PROMPT)[0]
    assert driver.core.stats().offload_load_failures_total == 1


def test_a_file_that_is_gone_is_written_again() -> None:
    disk = FakeDisk(filled().files)
    driver = start(disk)
    lost = list(disk.files)[4]
    del disk.files[lost]
    assert generate(driver, "again") == generate_alone(PROMPT)[0]
    assert driver.core.stats().offload_load_failures_total == 1
    assert lost in disk.files


def test_everything_fails() -> None:
    driver = start(FakeDisk(filled().files, fails=lambda _key: True, delay=2))
    assert generate(driver, "again") == generate_alone(PROMPT)[0]
    assert cached_tokens(driver) == 0


def test_a_disk_that_hangs_is_given_up() -> None:
    disk = FakeDisk(filled().files)
    driver = start(disk)
    disk.is_hung = True
    driver.add("again", PROMPT)
    driver.add("short", [5, 6, 7])  # passes it
    for _ in range(20):
        driver.step()
    assert ("short", 0) in driver.finished
    assert ("again", 0) not in driver.tokens
    driver.clock.advance(LOAD_SECONDS)
    while driver.scheduler.has_requests:
        driver.step()
        driver.scheduler.check()
    assert driver.tokens["again", 0] == generate_alone(PROMPT)[0]


def test_the_engine_waits_and_does_not_spin() -> None:
    disk = FakeDisk(filled().files, delay=1)
    driver = start(disk)
    before = disk._num_plans
    driver.add("again", PROMPT, max_tokens=1)
    steps = 0
    while driver.scheduler.has_requests:
        driver.step()
        steps += 1
    assert disk.num_waits > 0
    assert steps <= 6
    assert before < disk._num_plans


def test_a_wait_ends_when_the_request_is_aborted() -> None:
    disk = FakeDisk(filled().files)
    driver = start(disk)
    disk.is_hung = True
    driver.add("again", PROMPT)
    driver.step()
    assert driver.scheduler.kv.connector.num_busy > 0
    driver.abort("again")
    driver.scheduler.check()
    assert not driver.core.has_work
    disk.is_hung = False
    assert generate(driver, "next") == generate_alone(PROMPT)[0]
    assert driver.scheduler.kv.connector.num_busy == 0


@pytest.mark.parametrize("num_steps", range(1, 6))
@pytest.mark.parametrize("queue_depth", [1, 2])
def test_nothing_is_owned_after_an_abort_at_any_moment(num_steps: int, queue_depth: int) -> None:
    driver = start(FakeDisk(filled().files, delay=2), queue_depth=queue_depth)
    driver.add("again", PROMPT)
    for _ in range(num_steps):
        driver.step()
    driver.abort("again")
    driver.scheduler.check()
    driver.run()  # asserts at its end that no block is used
    assert driver.scheduler.kv.connector.num_busy in (0, 10), "loads without a waiting request end with a later report"
    assert generate(driver, "next") == generate_alone(PROMPT)[0]
    assert driver.scheduler.kv.connector.num_busy == 0


def test_no_request_is_preempted_while_the_prefix_is_loaded_from_disk() -> None:
    disk = FakeDisk(filled().files, delay=4)
    driver = start(disk, max_num_seqs=1)
    driver.add("running", [3, 1, 4], max_tokens=40)
    driver.step()
    driver.step()
    driver.add("urgent", PROMPT, priority=-5)
    while disk.num_loads < 9:
        driver.step()
        assert driver.core.stats().preemptions_total == 0, "preempted before the blocks were there"
    driver.run()
    assert driver.core.stats().preemptions_total == 1
    assert cached_tokens(driver) >= 40
    assert driver.tokens["urgent", 0] == generate_alone(PROMPT)[0]
    assert driver.tokens["running", 0] == generate_alone([3, 1, 4], max_tokens=40)[0]


def test_requests_with_one_prefix_load_it_once() -> None:
    disk = FakeDisk(filled().files, delay=3)
    driver = start(disk)
    prompts = {f"r{index}": [*PROMPT[:40], 50 + index] for index in range(4)}
    for name, prompt in prompts.items():
        driver.add(name, prompt)
    driver.run()
    for name, prompt in prompts.items():
        assert driver.tokens[name, 0] == generate_alone(prompt)[0]
    assert cached_tokens(driver) == 4 * 40
    assert disk.num_loads == 10


def test_another_tenant_does_not_hit() -> None:
    driver = start(FakeDisk(filled().files))
    driver.add("stranger", PROMPT, salt="tenant")
    driver.run()
    assert cached_tokens(driver) == 0


def test_a_single_block_is_not_worth_it() -> None:
    files = filled().files
    disk = FakeDisk({key: files[key] for key in list(files)[:1]})
    driver = start(disk)
    generate(driver, "again")
    assert disk.num_loads == 0


def test_a_disk_that_is_slower_than_computing_is_left_alone_but_tried_again() -> None:
    files = filled().files
    for seconds, num_loads in ((0.7, 0), (0.3, 10)):  # a block of four tokens is computed in 0.4 seconds
        disk = FakeDisk(dict(files), load_seconds=seconds, token_seconds=0.1)
        driver = start(disk)
        assert generate(driver, "again") == generate_alone(PROMPT)[0]
        assert disk.num_loads == num_loads
    driver = start(disk := FakeDisk(dict(files), load_seconds=0.7, token_seconds=0.1), num_host_blocks=30)
    for number in range(RETRY):
        assert disk.num_loads == 0
        generate(driver, str(number), max_tokens=1)
        driver.scheduler.kv.pool.drop_cached()  # the device's content alone
        driver.scheduler.kv.host.blocks.drop_cached()
    assert disk.num_loads > 0


def test_reset_forgets_host_and_disk_until_it_is_computed_again() -> None:
    disk = FakeDisk(filled().files)
    driver = start(disk)
    generate(driver, "again")
    assert driver.scheduler.kv.reset_prefix_cache() > 0
    assert driver.core.stats().num_offloaded_blocks == 0
    before = cached_tokens(driver)
    generate(driver, "third")
    assert cached_tokens(driver) == before
    assert len(disk.files) > 0
    driver.core.shutdown()
    restarted = start(FakeDisk(disk.files))
    generate(restarted, "fourth")
    assert cached_tokens(restarted) == 40


def test_reset_while_blocks_are_on_their_way() -> None:
    """Whatever comes in after it is not found."""
    files = filled().files
    hits = []
    for num_steps in range(1, 8):
        driver = start(FakeDisk(dict(files), delay=4, seed=num_steps))
        driver.add("again", PROMPT)
        for _ in range(num_steps):
            driver.step()
        hits.append(cached_tokens(driver))
        driver.scheduler.kv.reset_prefix_cache()
        driver.scheduler.check()
        driver.run()
        assert cached_tokens(driver) == hits[-1]
        assert driver.tokens["again", 0] == generate_alone(PROMPT)[0]
    assert hits[0] == 0
    assert hits[-1] == 40


def test_a_host_pool_smaller_than_the_prefix_brings_a_part() -> None:
    driver = start(FakeDisk(filled().files), num_host_blocks=8)
    assert generate(driver, "again") == generate_alone(PROMPT)[0]
    assert cached_tokens(driver) == 4 * 4


@pytest.mark.parametrize("max_tokens", [9, 13])
def test_host_blocks_of_a_request_that_returns_are_read_before_they_are_used_again(max_tokens: int) -> None:
    """In one step the elder's last block waits to be stored, and the youngest returns where the middle one ended."""
    driver = CoreDriver(
        make_config(num_blocks=16, num_host_blocks=40, offload=True, preemption_mode="swap"),
        disk=FakeDisk(),
        record=True,
    )
    requests = {"elder": (9, 30), "middle": (40, max_tokens), "youngest": (65, max_tokens)}
    prompts = {name: [first + i for i in range(16)] for name, (first, _) in requests.items()}
    for name, prompt in prompts.items():
        driver.add(name, prompt, max_tokens=requests[name][1])
    driver.run()
    returns = next(plan for plan in driver.executor.plans if copies(plan).swap_in)
    after = next(plan for plan in driver.executor.plans if plan.step_id > returns.step_id)
    assert not disk_orders(returns).stores
    assert disk_orders(after).stores, "nothing waited: the test shows nothing"
    for name, prompt in prompts.items():
        assert driver.tokens[name, 0] == generate_alone(prompt, max_tokens=requests[name][1])[0]


def test_host_blocks_of_a_request_that_returns_at_once_are_not_written_by_another_copy() -> None:
    """The urgent request needs room for all of its prompt, and takes one block of it: the one that it preempts returns
    in the same step. All of its blocks are still on the device; the host blocks are written by this step all the
    same, and blocks wait to be stored."""
    driver = CoreDriver(
        make_config(
            num_blocks=18,
            num_host_blocks=40,
            windows=(None,),
            offload=True,
            preemption_mode="swap",
            max_prefill_chunk=4,
        ),
        disk=FakeDisk(delay=6),
        record=True,
    )
    driver.add("first", PROMPT[:40], max_tokens=30)
    for _ in range(10):
        driver.step()
    driver.add("urgent", [90 - token for token in PROMPT[:40]], priority=-5)
    driver.run()
    swaps = [plan for plan in driver.executor.plans if copies(plan).swap_out and plan.new_sequences]
    assert any(plan.seq_ids and len(plan.new_sequences) == 2 for plan in swaps), "nothing returned at once"
    assert driver.tokens["first", 0] == generate_alone(PROMPT[:40], max_tokens=30)[0]
    assert driver.tokens["urgent", 0] == generate_alone([90 - token for token in PROMPT[:40]])[0]


def test_what_the_disk_drops_is_stored_again_when_it_is_used() -> None:
    disk = FakeDisk(limit=10)
    driver = start(disk)
    generate(driver, "first", max_tokens=1)
    generate(driver, "other", [(5 * i) % 89 + 1 for i in range(21)], max_tokens=1)
    stats = driver.core.stats()
    assert stats.offload_stored_blocks_total == 15
    assert stats.num_offloaded_blocks == len(disk.files) == 10
    generate(driver, "again", max_tokens=1)
    stats = driver.core.stats()
    assert stats.prefix_cache_hits_total == 40
    assert stats.offload_stored_blocks_total == 20
    assert stats.num_offloaded_blocks == len(disk.files) == 10


class TierMachine(EngineMachine):
    """EngineMachine over host and disk; now and then the engine is restarted, or a file is lost."""

    totals: ClassVar[Counter[str]] = Counter()

    @initialize(
        **{**ENGINES, "num_blocks": st.integers(6, 24), "num_host_blocks": st.integers(1, 60)},
        delay=st.integers(0, 6),
        seed=st.integers(0, 1000),
        failing=st.sampled_from([0, 2, 3]),
        limit=st.sampled_from([15, 10**9]),
    )
    def start(self, delay: int, seed: int, failing: int, limit: int, **options: Any) -> None:
        self.config = engine_config(offload=True, **options)
        self.disk_options = {
            "delay": delay,
            "limit": limit,
            "fails": lambda key: failing > 0 and sum(key[1]) % failing == 0,
        }
        self.disk = FakeDisk(seed=seed, **self.disk_options)
        self.drive(CoreDriver(self.config, disk=self.disk), 1 + seed % 2)

    @rule(data=st.data())
    def lose_a_file(self, data: st.DataObject) -> None:
        if self.disk.files:
            del self.disk.files[data.draw(st.sampled_from(sorted(self.disk.files)))]

    @rule(seed=st.integers(0, 1000))
    def restart(self, seed: int) -> None:
        """Between two engines all requests end; the disk stays."""
        if self.driver.core.has_work:
            return
        self.take_stock()
        self.driver.core.shutdown()
        self.disk = FakeDisk(self.disk.files, seed=seed, **self.disk_options)
        self.drive(CoreDriver(self.config, disk=self.disk), self.max_pins)
        self.totals["restarts"] += 1

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            core = self.driver.core
            if core.has_work:
                may_be_empty = bool(core._in_flight) or not self.driver.scheduler.has_requests
                planned = core.stats().steps_total, self.disk._num_plans
                self.driver.step()
                self.driver.scheduler.check()
                now = core.stats().steps_total, self.disk._num_plans
                may_be_empty |= not self.driver.scheduler.has_requests  # the last one's time was over
                assert may_be_empty or now != planned, "requests wait, and nothing is done"


def test_random_schedules_over_three_tiers() -> None:
    """The invariants hold after every step, every completion is that of a lone run, and everything does happen."""
    TierMachine.totals.clear()
    run_machine(TierMachine, examples=7, steps=80)
    # Which engines hypothesis draws is chance, so only what every draw brings is asked for: each of the rest (hits on
    # disk, failures, restarts, preemption) has a test of its own above.
    totals = TierMachine.totals
    assert totals["steps_total"] > 300
    assert totals["offload_stored_blocks_total"] > 0
    assert totals["host_cache_hit_blocks_total"] > 0
