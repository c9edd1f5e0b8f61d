"""Background requests: no other request waits for one, and they are computed beside the others."""

from __future__ import annotations

import pytest

from quire.adapter_orders import AdapterRef
from quire.config.adapters import AdaptersConfig
from quire.decoding.parallel import create_sequences
from quire.decoding.sequence import Deferral, Request, RequestStatus
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.scheduler.adapters import AdapterGate, AdapterSlots
from quire.scheduler.running import RunningSet
from tests.fakes.core import CoreDriver, generate_alone, make_config


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + 7 * i) % 90 + 1 for i in range(length)]


def running(driver: CoreDriver) -> list[str]:
    return [sequence.request.request_id for sequence in driver.scheduler._running.sequences]


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_a_live_request_takes_the_place_of_one_in_the_background(queue_depth: int) -> None:
    driver = CoreDriver(make_config(max_num_seqs=1, queue_depth=queue_depth))
    driver.add("line", prompt(6), max_tokens=20, is_background=True)
    for _ in range(4):
        driver.step()
    driver.clock.advance(10**6)
    driver.add("live", prompt(4, 9), max_tokens=6)
    driver.step()
    driver.step()
    assert running(driver)[:1] == ["live"]
    driver.run()
    assert [name for name, _ in driver.finished] == ["live", "line"]
    assert driver.tokens["line", 0] == generate_alone(prompt(6), max_tokens=20)[0]


@pytest.mark.parametrize("age", [0, 10**8])
def test_neither_age_nor_priority_brings_one_before_a_live_request(age: float) -> None:
    driver = CoreDriver(make_config(max_num_seqs=1))
    driver.add("line", prompt(4), max_tokens=2, is_background=True, priority=-100)
    driver.clock.advance(age)
    driver.add("live", prompt(4), max_tokens=2, priority=100)
    driver.run()
    assert [name for name, _ in driver.finished] == ["live", "line"]


def test_memory_goes_to_live_requests() -> None:
    driver = CoreDriver(make_config(num_blocks=13, enable_prefix_caching=False))
    for name in "ab":
        driver.add(name, prompt(8), max_tokens=30, is_background=True)
    for _ in range(8):
        driver.step()
    driver.add("live", prompt(20, 5), max_tokens=12)
    driver.step()
    assert "live" in running(driver)
    driver.run()
    assert next(iter(driver.finished))[0] == "live"
    assert len(driver.finished) == 3


def test_a_step_gives_its_tokens_to_live_requests_first() -> None:
    driver = CoreDriver(make_config(max_num_batched_tokens=16), record=True)
    driver.add("line", prompt(60), max_tokens=2, is_background=True)
    driver.step()
    driver.add("live", prompt(30, start=5), max_tokens=2)
    driver.step()
    assert driver.executor.plans[-1].num_tokens == [1, 15]
    driver.run()
    assert next(iter(driver.finished))[0] == "live"


@pytest.mark.parametrize("is_background", [False, True])
def test_a_live_request_does_not_wait_for_a_common_prefix(is_background: bool) -> None:
    shared = prompt(40)
    driver = CoreDriver(make_config(num_blocks=300, max_num_batched_tokens=16))
    driver.add("first", [*shared, 1, 2], max_tokens=2, is_background=True)
    driver.step()
    driver.add("second", [*shared, 3, 4], max_tokens=2, is_background=is_background)
    driver.step()
    assert ("second" in running(driver)) is not is_background, "lines wait for one another, and others not for them"
    driver.run()
    assert len(driver.finished) == 2


def test_clients_take_turns_in_the_background() -> None:
    driver = CoreDriver(make_config(max_num_seqs=1))
    for name in ("a1", "a2", "a3", "b1"):
        driver.add(name, prompt(4), max_tokens=2, is_background=True, client=name[0])
    driver.run()
    assert [name for name, _ in driver.finished] == ["a1", "b1", "a2", "a3"]


class Adapters:
    """Gate of adapters over a running set. Each adapter has a slot of `num_slots`; `max_running` run at a time."""

    def __init__(self, max_running: int, num_slots: int) -> None:
        self.running = RunningSet()
        self.slots = AdapterSlots(self.running, AdaptersConfig(max_running, 16, num_slots))
        self.gate = AdapterGate(self.slots)
        self._numbers = iter(range(999))

    def request(self, adapter: str, *, is_background: bool = False) -> Request:
        source = EngineRequest(
            request_id=f"{adapter}{next(self._numbers)}", prompt_token_ids=[1], params=SamplingParams(), max_tokens=1,
            seed=0, adapter=AdapterRef(f"/{adapter}", adapter.encode()), is_background=is_background,
        )  # fmt: skip
        found = Request(source, 0.0)
        create_sequences(found, source, iter(range(9)))
        return found

    def load(self, adapters: str) -> None:
        for adapter in adapters:
            self.slots.begin_load(AdapterRef(f"/{adapter}", adapter.encode()))
            orders = self.slots.take_orders(may_wait=False)
            assert orders is not None
            self.slots.update([(orders.loads[0][0], "")], [])

    def run(self, adapter: str, *, is_background: bool = False) -> Request:
        request = self.request(adapter, is_background=is_background)
        self.running.enter(request, request.sequences)
        self.gate.forget(request)
        return request

    def check(self, request: Request, now: float = 0.0) -> Deferral | None:
        return self.gate.check(request, None, now)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_slots", [1, 2])
def test_adapters_of_background_requests_make_room(num_slots: int) -> None:
    for is_background in (False, True):
        adapters = Adapters(1, num_slots)
        adapters.load("ab"[:num_slots])
        line = adapters.run("a", is_background=True)
        assert adapters.check(adapters.request("b", is_background=is_background)) is not None
        assert adapters.slots.take_victims() == ([] if is_background else [line])
        assert adapters.slots.take_victims() == []


@pytest.mark.parametrize("num_slots", [2, 3])
@pytest.mark.parametrize("is_background", [False, True])
def test_no_live_request_of_an_adapter_waits_for_a_crowded_out_line(num_slots: int, is_background: bool) -> None:
    adapters = Adapters(2, num_slots)
    adapters.load("abc"[:num_slots])
    for name in "abb":
        adapters.run(name)
    assert adapters.check(adapters.request("c", is_background=is_background)) is not None
    deferral = adapters.check(adapters.request("a"), 9.0)
    assert (deferral is None) is is_background
    assert adapters.check(adapters.request("a", is_background=True), 9.0) is not None


@pytest.mark.parametrize("num_slots", [2, 3])
def test_a_line_leaves_its_adapter_once_no_live_request_uses_it(num_slots: int) -> None:
    adapters = Adapters(2, num_slots)
    adapters.load("abc"[:num_slots])
    first, _, line = adapters.run("a"), adapters.run("b"), adapters.run("a", is_background=True)
    waiting = adapters.request("c")
    assert adapters.check(waiting) is not None
    assert adapters.slots.take_victims() == [], "it would free no adapter"
    other = adapters.request("b", is_background=True)
    deferral = adapters.check(other)
    assert deferral is not None, "no line takes an adapter that a live request waits for"
    adapters.running.leave(first)
    assert adapters.slots.take_victims() == [line]
    adapters.running.leave(line)
    adapters.gate.forget(waiting)
    assert not deferral.is_pending()
    assert adapters.check(other) is None


def test_a_paused_engine_takes_no_adapter_from_a_line() -> None:
    """The live request cannot start, and the pause may wait for the line."""
    adapters = Adapters(1, 2)
    adapters.load("ab")
    line = adapters.run("a", is_background=True)
    assert adapters.check(adapters.request("b")) is not None
    adapters.slots.holds_new = True
    assert adapters.slots.take_victims() == []
    assert adapters.check(line) is None
    adapters.slots.holds_new = False
    assert adapters.slots.take_victims() == [line]


@pytest.mark.parametrize("is_background", [False, True])
@pytest.mark.parametrize("reserves_slots", [False, True])
def test_a_preempted_line_that_waits_holds_up_no_other(is_background: bool, reserves_slots: bool) -> None:
    driver = CoreDriver(make_config())
    driver.add("waits", prompt(4), max_tokens=2, is_background=is_background)
    driver.add("next", prompt(4), max_tokens=2, is_background=True)
    request = driver.scheduler._requests["waits"]
    request.status = RequestStatus.PREEMPTED
    request.deferral = Deferral("adapter", 0, lambda: True, reserves_slots=reserves_slots)
    driver.step()
    assert running(driver) == (["next"] if is_background and not reserves_slots else [])


def with_deferred(queue_depth: int = 1, **deferral: object) -> tuple[CoreDriver, list[str]]:
    """Two running lines, with all request slots, and a live request that is deferred until the list is empty."""
    driver = CoreDriver(make_config(max_num_seqs=2, queue_depth=queue_depth, max_num_batched_tokens=16))
    for name in ("line1", "line2"):
        driver.add(name, prompt(6), max_tokens=20, is_background=True)
    for _ in range(4):
        driver.step()
    driver.add("deferred", prompt(4, 5), max_tokens=6)
    awaited = ["event"]
    driver.scheduler._requests["deferred"].deferral = Deferral("any", 2, lambda: bool(awaited), **deferral)  # type: ignore[arg-type]
    return driver, awaited


@pytest.mark.parametrize("queue_depth", [1, 2])
@pytest.mark.parametrize("reserves_slots", [False, True])
def test_a_live_request_behind_a_deferred_one_takes_the_place_of_a_line(reserves_slots: bool, queue_depth: int) -> None:
    driver, awaited = with_deferred(queue_depth, reserves_slots=reserves_slots)
    driver.add("live", prompt(4, 9), max_tokens=6)
    driver.step()
    driver.step()
    assert running(driver) == (["live"] if reserves_slots else ["live", "line1"])
    awaited.clear()
    driver.run()
    assert {name for name, _ in list(driver.finished)[:2]} == {"live", "deferred"}
    for name in ("line1", "line2"):
        assert driver.tokens[name, 0] == generate_alone(prompt(6), max_tokens=20)[0]


@pytest.mark.parametrize("length", [15, 16])
def test_a_line_goes_on_until_a_prompt_behind_a_deferred_one_fits_into_a_step(length: int) -> None:
    """Such a prompt starts as a whole or not at all: beside one line the budget of 16 tokens has room for 15."""
    driver, awaited = with_deferred(reserves_slots=False)
    driver.add("live", prompt(length, 9), max_tokens=6)
    for _ in range(3):
        driver.step()
    assert ("live" in running(driver)) is (length == 15)
    assert len(running(driver)) == 2
    awaited.clear()
    driver.run()
    assert len(driver.finished) == 4
