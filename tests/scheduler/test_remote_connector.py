"""Prefixes that come from a remote store, and finished requests whose blocks are sent there, driven through the engine
core with a network that delays, loses, reorders and repeats."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import initialize, rule

from quire.engine.core import LAST_TRANSFERS
from quire.errors import UserError
from quire.scheduler.gates import LOAD_SECONDS
from tests.fakes.core import CoreDriver, generate_alone, make_config
from tests.fakes.remote import FakeRemote, remote_scheduler
from tests.machines import run_machine
from tests.scheduler.test_state_machine import ENGINES, EngineMachine, engine_config

PROMPT = [(7 * i) % 90 + 1 for i in range(41)]
"""Ten full blocks of four tokens, all but the last one's hits."""


def start(remote: FakeRemote, *, sends: bool = True, **options) -> CoreDriver:  # type: ignore[no-untyped-def]
    return CoreDriver(make_config(**options), remote=remote, make_scheduler=remote_scheduler(sends=sends))


def generate(driver: CoreDriver, name: str, prompt: list[int] = PROMPT, **params) -> list[int]:  # type: ignore[no-untyped-def]
    driver.add(name, prompt, **params)
    driver.run()  # asserts at its end that no block is used
    return driver.tokens[name, 0]


def cached_tokens(driver: CoreDriver) -> int:
    return driver.core.stats().prefix_cache_hits_total


def filled(**options) -> dict:  # type: ignore[no-untyped-def,type-arg]
    """What an engine sent that had computed PROMPT."""
    remote = FakeRemote()
    generate(start(remote, **options), "first", max_tokens=1)
    return remote.files


def finish(driver: CoreDriver) -> None:
    """Step until the last request has ended, whatever is being sent."""
    while driver.scheduler.has_requests:
        driver.step()
        driver.scheduler.check()


@pytest.mark.parametrize("queue_depth", [1, 2])
@pytest.mark.parametrize("windows", [(None,), (None, 7), (5, 5), (None, 5, 5)])
def test_an_engine_hits_what_another_one_sent(queue_depth: int, windows: tuple[int | None, ...]) -> None:
    options = {"queue_depth": queue_depth, "windows": windows}
    remote = FakeRemote(filled(**options), delay=3)
    driver = start(remote, sends=False, **options)
    assert generate(driver, "again") == generate_alone(PROMPT)[0]
    assert cached_tokens(driver) == 40
    assert remote.num_loads > 0
    assert remote.num_waits > 0, "the engine span"


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_the_blocks_of_a_finished_request_are_held_until_they_are_sent(queue_depth: int) -> None:
    remote = FakeRemote(delay=0)
    driver = start(remote, queue_depth=queue_depth)
    remote.is_hung = True
    driver.add("r", PROMPT, n=2, temperature=1.0, max_tokens=3)
    finish(driver)
    pool = driver.scheduler.kv.pool
    held = pool.num_used
    assert held >= 10 + 2
    for _ in range(5):
        driver.step()
    driver.abort("r")
    driver.scheduler.kv.reset_prefix_cache()
    driver.scheduler.check()
    assert pool.num_used == held, "they are still being read"
    assert driver.core.has_work
    remote.is_hung = False
    driver.run()
    assert pool.num_used == 0
    assert remote.num_sends == 2


def test_an_aborted_request_is_not_sent() -> None:
    remote = FakeRemote()
    driver = start(remote)
    driver.add("r", PROMPT, max_tokens=20)
    for _ in range(4):
        driver.step()
    driver.abort("r")
    driver.run()
    assert remote.num_sends == 0


def test_a_sibling_copies_the_block_that_is_being_sent() -> None:
    """Both fork from a partly filled block; the first ends at once, the second goes on writing."""
    remote = FakeRemote(delay=6, seed=3)
    driver = start(remote)
    request = {"prompt": PROMPT[:10], "n": 2, "temperature": 1.0, "max_tokens": 12}
    expected = generate_alone(**request)
    first = expected[0][0]
    assert first != expected[1][0]
    driver.add("r", **request, stop_token_ids=[first])
    driver.run()
    assert driver.tokens["r", 0] == [first]
    assert driver.tokens["r", 1] == generate_alone(**request, stop_token_ids=[first])[1]


def test_the_engine_does_not_sleep_while_blocks_are_being_sent() -> None:
    remote = FakeRemote()
    driver = start(remote)
    remote.is_hung = True
    driver.add("r", PROMPT)
    finish(driver)
    with pytest.raises(UserError, match="still on their way"):
        driver.core._sleep.fall_asleep("1")
    assert driver.executor.asleep == 0
    remote.is_hung = False
    driver.core._sleep.fall_asleep("1")
    assert driver.executor.asleep == 1
    assert driver.scheduler.kv.pool.num_used == 0


def test_a_shutdown_sends_what_is_held_but_does_not_wait_for_ever() -> None:
    for is_hung in (False, True):
        remote = FakeRemote()
        driver = start(remote)
        remote.is_hung = is_hung
        driver.add("r", PROMPT)
        finish(driver)
        before = remote.num_waits
        driver.core.shutdown()
        assert driver.executor.is_shut_down
        assert (remote.num_sends == 0) is is_hung
        assert remote.num_waits - before <= LAST_TRANSFERS


def test_blocks_that_fail_are_computed() -> None:
    remote = FakeRemote(filled(), fails=0.5, seed=4)
    driver = start(remote, sends=False)
    assert generate(driver, "again") == generate_alone(PROMPT)[0]
    assert 0 < remote.num_failures < 10
    assert cached_tokens(driver) < 40


def test_what_the_store_has_lost_is_computed() -> None:
    remote = FakeRemote(filled())
    driver = start(remote, sends=False)
    for key in list(remote.files)[4:]:
        del remote.files[key]
    assert generate(driver, "again") == generate_alone(PROMPT)[0]
    assert cached_tokens(driver) == 16


def test_a_network_that_hangs_is_given_up_and_its_blocks_are_not_reused() -> None:
    remote = FakeRemote(filled())
    driver = start(remote, sends=False, num_blocks=40)
    remote.is_hung = True
    driver.add("again", PROMPT)
    driver.add("short", [5, 6, 7])  # passes it
    for _ in range(20):
        driver.step()
    assert ("short", 0) in driver.finished
    assert ("again", 0) not in driver.tokens
    driver.clock.advance(LOAD_SECONDS)
    finish(driver)
    assert driver.tokens["again", 0] == generate_alone(PROMPT)[0]
    assert driver.scheduler.kv.pool.num_used == 10, "they may still be written"
    remote.is_hung = False
    driver.run()


@pytest.mark.parametrize("num_steps", range(1, 6))
@pytest.mark.parametrize("queue_depth", [1, 2])
def test_nothing_is_owned_after_an_abort_at_any_moment(num_steps: int, queue_depth: int) -> None:
    driver = start(FakeRemote(filled(), delay=2), queue_depth=queue_depth)
    driver.add("again", PROMPT)
    for _ in range(num_steps):
        driver.step()
    driver.abort("again")
    driver.scheduler.check()
    driver.run()
    assert generate(driver, "next") == generate_alone(PROMPT)[0]


@pytest.mark.parametrize("forget", ["reset", "evict"])
def test_what_is_forgotten_on_its_way_is_not_found(forget: str) -> None:
    """The prefix cache is reset, or the content is in doubt, while the blocks are being loaded. No request waits for a
    load whose content was reset."""
    remote = FakeRemote(filled())
    driver = start(remote, sends=False)
    remote.is_hung = True
    driver.add("again", PROMPT)
    driver.step()
    kv, (request,) = driver.scheduler.kv, driver.scheduler._requests.values()
    assert request.deferral.is_pending()
    if forget == "reset":
        kv.reset_prefix_cache()
        assert not request.deferral.is_pending()
        finish(driver)
    else:
        kv.evict(request.sequences[0].chain)
    driver.scheduler.check()
    remote.is_hung = False
    driver.run()
    assert remote.num_loads == 10
    assert cached_tokens(driver) == 0
    assert driver.tokens["again", 0] == generate_alone(PROMPT)[0]


def test_requests_with_one_prefix_load_it_once() -> None:
    remote = FakeRemote(filled(), delay=3)
    driver = start(remote, sends=False)
    prompts = {f"r{index}": [*PROMPT[:40], 50 + index] for index in range(4)}
    for name, prompt in prompts.items():
        driver.add(name, prompt)
    driver.run()
    for name, prompt in prompts.items():
        assert driver.tokens[name, 0] == generate_alone(prompt)[0]
    assert cached_tokens(driver) == 4 * 40
    assert remote.num_loads == 10


def test_blocks_that_are_being_loaded_or_sent_count_as_stored() -> None:
    """While the plan that orders a load is in flight, it computes other sequences' tokens, and none of these."""
    remote = FakeRemote(filled(), delay=3)
    driver = start(remote, queue_depth=2)
    driver.add("running", [3, 1, 4], max_tokens=40)
    for _ in range(4):
        driver.step()
    driver.add("again", PROMPT, max_tokens=2)
    num_moving: Counter[str] = Counter()
    while driver.core.has_work:
        driver.step()  # compares every slot with the ledger
        transfers, in_flight = driver.scheduler.kv.transfer_blocks, driver.scheduler._in_flight.values()
        num_moving.update(loads=len(transfers._arrivals), sends=len(transfers._sending))
        num_moving["ordered in flight"] += any(flight.plan.transfers is not None for flight in in_flight)
    assert min(num_moving[what] for what in ("loads", "sends", "ordered in flight")) > 0, num_moving


def test_no_request_is_preempted_while_the_prefix_is_loaded() -> None:
    remote = FakeRemote(filled(), delay=4)
    driver = start(remote, sends=False, max_num_seqs=1)
    driver.add("running", [3, 1, 4], max_tokens=40)
    driver.step()
    driver.step()
    driver.add("urgent", PROMPT, priority=-5)
    while remote.num_loads < 9:
        driver.step()
        assert driver.core.stats().preemptions_total == 0, "preempted before the blocks were there"
    driver.run()
    assert driver.core.stats().preemptions_total == 1
    assert cached_tokens(driver) >= 40
    assert driver.tokens["urgent", 0] == generate_alone(PROMPT)[0]
    assert driver.tokens["running", 0] == generate_alone([3, 1, 4], max_tokens=40)[0]


def test_as_many_loads_as_slots_do_not_idle_the_engine() -> None:
    remote = FakeRemote(filled(), delay=30)
    driver = start(remote, sends=False, max_num_seqs=2)
    for salt in ("a", "b"):
        driver.add(f"loads {salt}", [*PROMPT, ord(salt)], max_tokens=2)
    driver.add("runs", [3, 1, 4], max_tokens=5)
    while ("runs", 0) not in driver.finished:
        driver.step()
        driver.scheduler.check()
    assert len(driver.tokens) == 1, "both others still wait"
    driver.run()
    assert driver.tokens["loads a", 0] == generate_alone([*PROMPT, ord("a")], max_tokens=2)[0]


def test_ends_that_are_reported_again_change_nothing() -> None:
    remote = FakeRemote(repeats=1.0, delay=2)
    driver = start(remote, num_blocks=30)
    for number in range(12):
        prompt = [*PROMPT[: 8 + 2 * (number % 4)], 60 + number]
        assert generate(driver, str(number), prompt) == generate_alone(prompt)[0]
        driver.scheduler.kv.pool.drop_cached()
    assert remote.num_loads > 10
    assert remote.num_repeats > 10


def test_no_report_says_of_one_load_that_it_succeeded_and_failed() -> None:
    """An end is reported again in a later report, when its number means nothing any more; not beside the first time."""
    files = filled()
    for seed in range(20):
        driver = start(FakeRemote(dict(files), fails=0.5, repeats=1.0, seed=seed), sends=False)
        update = driver.scheduler.kv.connector.update

        def checked_update(report, update=update, seed=seed) -> None:  # type: ignore[no-untyped-def]
            assert not set(report.loaded) & set(report.failed), f"seed {seed}: {report}"
            update(report)

        driver.scheduler.kv.connector.update = checked_update
        assert generate(driver, "again") == generate_alone(PROMPT)[0]


class RemoteMachine(EngineMachine):
    """EngineMachine over a remote store; now and then the engine is restarted, or the store loses a block."""

    totals: ClassVar[Counter[str]] = Counter()

    @initialize(
        **{**ENGINES, "num_blocks": st.integers(6, 40)},
        delay=st.integers(0, 6),
        seed=st.integers(0, 1000),
        lost=st.sampled_from([0.0, 0.1]),
        fails=st.sampled_from([0.0, 0.1, 0.5]),
        repeats=st.sampled_from([0.0, 0.5]),
    )
    def start(self, delay: int, seed: int, lost: float, fails: float, repeats: float, **options: Any) -> None:
        self.config = engine_config(**options)
        self.remote_options = {"delay": delay, "lost": lost, "fails": fails, "repeats": repeats}
        self.remote = FakeRemote(seed=seed, **self.remote_options)
        self.sends = seed % 4 > 0
        self.begin()

    def begin(self) -> None:
        make_scheduler = remote_scheduler(sends=self.sends)
        self.drive(CoreDriver(self.config, remote=self.remote, make_scheduler=make_scheduler), max_pins=1)

    @rule(data=st.data())
    def lose_a_block(self, data: st.DataObject) -> None:
        if self.remote.files:
            del self.remote.files[data.draw(st.sampled_from(sorted(self.remote.files)))]

    @rule(seed=st.integers(0, 1000))
    def restart(self, seed: int) -> None:
        """Between two engines all requests end; the store stays."""
        if self.driver.core.has_work:
            return
        self.take_stock()
        self.driver.core.shutdown()
        self.remote = FakeRemote(self.remote.files, seed=seed, **self.remote_options)
        self.begin()
        self.totals["restarts"] += 1

    @property
    def num_free_blocks(self) -> int:
        return self.driver.scheduler.kv.pool.num_allocatable

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            core = self.driver.core
            if core.has_work:
                may_be_empty = bool(core._in_flight) or not self.driver.scheduler.has_requests
                planned, free = (core.stats().steps_total, self.remote.num_plans), self.num_free_blocks
                self.driver.step()
                self.driver.scheduler.check()
                now = core.stats().steps_total, self.remote.num_plans
                may_be_empty |= not self.driver.scheduler.has_requests  # the last one's time was over
                # A load that has failed gives its blocks back at the end of a pass: what needs them starts in the next.
                may_be_empty |= self.num_free_blocks > free
                assert may_be_empty or now != planned, "requests wait, and nothing is done"

    def take_stock(self) -> None:
        super().take_stock()
        remote = self.remote
        self.totals.update(
            loads=remote.num_loads, sends=remote.num_sends, failures=remote.num_failures, repeats=remote.num_repeats
        )


def test_random_schedules_over_a_remote_store() -> None:
    """No leak, no block with two owners, every wait ends, and every completion is that of a lone run without a
    connector."""
    RemoteMachine.totals.clear()
    run_machine(RemoteMachine, examples=6, steps=80)
    # Which engines hypothesis draws is chance, so only what every draw brings is asked for: each of the rest has a test
    # of its own above.
    totals = RemoteMachine.totals
    assert totals["steps_total"] > 100
    assert totals["loads"] > 0
    assert totals["sends"] > 0
