"""A reason to wait of the tests' own: one class, and one line in the scheduler's list of gates."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.decoding.sequence import Deferral, Request
from quire.kv_cache.layout import KVCacheLayout
from quire.kv_cache.manager import KVCacheManager
from quire.request import FinishReason
from quire.scheduler.admission import Quote
from quire.scheduler.gates import GateStage, default_gates
from quire.scheduler.preemption import PreemptionCosts
from quire.scheduler.scheduler import Scheduler
from tests.fakes.core import CoreDriver, generate_alone, make_config


class EventGate:
    """A request whose id is closed waits until it is opened, at most `patience` seconds."""

    reason = "event"

    def __init__(self, stage: GateStage = GateStage.LOOK_UP) -> None:
        self.stage = stage
        self.closed: set[str] = set()
        self.patience = 1e9
        self.reserves_slots = True
        self.num_checks = self.num_cancelled = 0
        self.forgotten: list[str] = []

    def check(self, request: Request, quote: Quote, now: float) -> Deferral | None:
        self.num_checks += 1
        name = request.request_id
        if name not in self.closed:
            return None
        deadline = now + self.patience
        self.patience = 0.0 if self.patience < 1e9 else self.patience
        return Deferral(
            self.reason, quote.num_blocks, lambda: name in self.closed, deadline, self._cancel, self.reserves_slots
        )

    def forget(self, request: Request) -> None:
        self.forgotten.append(request.request_id)

    def _cancel(self) -> None:
        self.num_cancelled += 1


def make_driver(gate: EventGate, **options: Any) -> CoreDriver:
    def gated(config: EngineConfig, layout: KVCacheLayout, costs: PreemptionCosts | None) -> Scheduler:
        kv = KVCacheManager(layout, enable_prefix_caching=config.cache.enable_prefix_caching)
        return Scheduler(config.scheduler, kv, costs, gates=[gate, *default_gates(kv)])

    return CoreDriver(make_config(**options), make_scheduler=gated, record=True)


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + 7 * i) % 90 + 1 for i in range(length)]


def steps(driver: CoreDriver, count: int) -> None:
    for _ in range(count):
        driver.step()
        driver.scheduler.check()


def started(driver: CoreDriver) -> list[int]:
    return [new.seq_id for plan in driver.executor.plans for new in plan.new_sequences]


@pytest.mark.parametrize("stage", list(GateStage))
@pytest.mark.parametrize("queue_depth", [1, 2])
def test_a_request_waits_for_the_event_and_others_pass(stage: GateStage, queue_depth: int) -> None:
    gate = EventGate(stage)
    gate.closed.add("gated")
    driver = make_driver(gate, queue_depth=queue_depth)
    driver.add("gated", prompt(9), n=2, temperature=1.0)
    driver.add("other", prompt(5, start=30))
    steps(driver, 5)
    assert started(driver) == [2]
    stats = driver.core.stats()
    assert stats.num_waiting == stats.num_deferred == 1
    gate.closed.clear()
    driver.run()
    assert driver.core.stats().num_deferred == 0
    assert started(driver) == [2, 0], "the second sample forks"
    assert [driver.tokens["gated", i] for i in range(2)] == generate_alone(prompt(9), n=2, temperature=1.0)
    assert (gate.num_cancelled, gate.forgotten.count("gated")) == (1, 2), "forgotten at the start and at the end"


def test_a_wait_asks_only_whether_it_goes_on() -> None:
    gate = EventGate()
    gate.closed.add("gated")
    driver = make_driver(gate)
    driver.add("gated", prompt(9))
    steps(driver, 20)
    assert gate.num_checks == 1
    gate.closed.clear()
    driver.run()
    assert gate.num_checks == 2


@pytest.mark.parametrize("stage", list(GateStage))
@pytest.mark.parametrize("queue_depth", [1, 2])
def test_an_abort_ends_the_wait(stage: GateStage, queue_depth: int) -> None:
    gate = EventGate(stage)
    gate.closed.add("gated")
    driver = make_driver(gate, queue_depth=queue_depth)
    driver.add("gated", prompt(9))
    driver.add("other", prompt(5, start=30))
    steps(driver, 2)
    driver.abort("gated")
    driver.scheduler.check()
    assert driver.core.stats().num_deferred == 0
    assert (gate.num_cancelled, gate.forgotten) == (1, ["other", "gated"])
    driver.run()
    assert ("gated", 0) not in driver.tokens


def test_the_time_limit_of_a_request_ends_its_wait() -> None:
    gate = EventGate()
    gate.closed.add("gated")
    driver = make_driver(gate)
    driver.add("gated", prompt(9), timeout_s=0.05)
    driver.run(max_steps=10)
    assert driver.finished["gated", 0] is FinishReason.TIMEOUT
    assert (gate.num_cancelled, gate.forgotten) == (1, ["gated"])


def test_the_deadline_of_a_wait_ends_it() -> None:
    gate = EventGate()
    gate.closed.add("gated")
    gate.patience = 0.1
    driver = make_driver(gate)
    driver.add("gated", prompt(9))
    steps(driver, 9)
    assert gate.num_checks == 1
    steps(driver, 4)
    assert gate.num_checks >= 2, "the gate is asked again, and may defer again"
    gate.closed.clear()
    driver.run()
    assert driver.tokens["gated", 0] == generate_alone(prompt(9))[0]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("queue_depth", [1, 2])
def test_a_preempted_request_waits_again_and_no_later_one_starts(mode: str, queue_depth: int) -> None:
    gate = EventGate()
    driver = make_driver(
        gate, num_blocks=12, queue_depth=queue_depth, preemption_mode=mode, num_host_blocks=40, max_num_seqs=4
    )
    driver.add("victim", prompt(20), max_tokens=20, priority=1)
    steps(driver, 4)
    gate.closed.add("victim")
    driver.add("urgent", prompt(24, start=40), max_tokens=12, priority=-1)
    steps(driver, 2)
    assert driver.core.stats().preemptions_total == 1
    driver.add("later", prompt(3, start=70), priority=5)
    steps(driver, 30)
    assert driver.finished["urgent", 0] is FinishReason.LENGTH
    assert ("later", 0) not in driver.tokens
    assert started(driver) == [0, 1]
    gate.closed.clear()
    driver.run()
    assert driver.core.stats().swap_preemptions_total == (mode == "swap")
    assert driver.tokens["victim", 0] == generate_alone(prompt(20), max_tokens=20)[0]


@pytest.mark.parametrize("stage", [GateStage.LOOK_UP, GateStage.BEGIN])
def test_no_running_request_is_preempted_for_a_deferred_one(stage: GateStage) -> None:
    gate = EventGate(stage)
    gate.closed.add("urgent")
    driver = make_driver(gate, max_num_seqs=1)
    driver.add("running", prompt(8), max_tokens=30, priority=1)
    steps(driver, 2)
    driver.add("urgent", prompt(9, start=40), max_tokens=3, priority=-1)
    steps(driver, 5)
    assert driver.core.stats().preemptions_total == 0
    gate.closed.clear()
    steps(driver, 1)
    assert driver.core.stats().preemptions_total == 1
    driver.run()
    assert driver.tokens["running", 0] == generate_alone(prompt(8), max_tokens=30)[0]


def test_slots_and_blocks_are_reserved_for_a_deferred_request() -> None:
    gate = EventGate()
    gate.closed.add("gated")
    driver = make_driver(gate, num_blocks=20, max_num_seqs=3)
    driver.add("gated", prompt(20), n=2, max_tokens=4, temperature=1.0)
    for number in range(3):
        driver.add(f"x{number}", prompt(2, start=10 + number), max_tokens=20)
    steps(driver, 3)
    assert started(driver) == [2], "two of the three request slots are the deferred request's"
    gate.closed.clear()
    driver.run()


def test_an_event_outside_the_engine_holds_no_slots_and_its_requests_get_the_next_ones() -> None:
    gate = EventGate()
    gate.reserves_slots = False
    gate.closed |= {"gated 0", "gated 1"}
    driver = make_driver(gate, max_num_seqs=2)
    for number in range(2):
        driver.add(f"gated {number}", prompt(9, start=40 + number), max_tokens=3)
    for number in range(6):
        driver.add(f"x{number}", prompt(2, start=10 + number), max_tokens=5)
    steps(driver, 2)
    assert started(driver) == [2, 3], "as many requests as there are slots wait, and later ones use the slots"
    gate.closed.clear()
    driver.run()
    assert started(driver) == [2, 3, 0, 1, 4, 5, 6, 7]


def test_a_core_whose_requests_all_wait_outside_is_blocked() -> None:
    gate = EventGate()
    gate.closed.add("gated")
    driver = make_driver(gate)
    driver.add("gated", prompt(5), max_tokens=3)
    driver.add("runs", prompt(3), max_tokens=1)
    blocked = []
    for _ in range(4):
        steps(driver, 1)
        blocked.append(driver.core.is_blocked)
    assert blocked == [False, True, True, True]
    gate.closed.clear()
    steps(driver, 1)
    assert not driver.core.is_blocked
    driver.run()
    assert not driver.core.is_blocked


def test_the_first_waiting_request_is_looked_up_once_in_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Priority preemption and admission share the quote, unless the pool has changed between them."""
    looked_up = []
    original = KVCacheManager.match_prefix
    monkeypatch.setattr(
        KVCacheManager, "match_prefix", lambda self, *args: looked_up.append(1) or original(self, *args)
    )
    driver = make_driver(EventGate(), block_size=8)
    driver.add("running", prompt(8), max_tokens=12, priority=1)
    steps(driver, 3)
    looked_up.clear()
    driver.add("urgent", prompt(9, start=40), priority=-1)
    steps(driver, 1)
    assert started(driver) == [0, 1]
    assert len(looked_up) == 1


@pytest.mark.parametrize("seed", range(6))
def test_random_crossings(seed: int) -> None:
    """Small pools, preemption, aborts and time limits around a gate that opens and closes: every completion is that of
    a lone run, and nothing is kept."""
    rng = random.Random(seed)
    gate = EventGate(rng.choice(list(GateStage)))
    gate.reserves_slots = seed % 2 == 0
    driver = make_driver(
        gate,
        num_blocks=rng.randint(16, 40),
        windows=rng.choice([(None, None), (None, 5), (5, 5)]),
        max_num_seqs=rng.randint(2, 6),
        queue_depth=rng.choice([1, 2]),
        preemption_mode=rng.choice(["recompute", "swap"]),
        num_host_blocks=20,
    )
    requests: dict[str, dict[str, Any]] = {}
    aborted = set()
    for number in range(60):
        name = f"r{number}"
        requests[name] = {
            "prompt": prompt(rng.randint(1, 20), start=rng.choice([0, 0, number])),
            "n": rng.choice([1, 1, 2]),
            "max_tokens": rng.randint(1, 10),
            "temperature": 1.0,
        }
        if rng.random() < 0.5:
            gate.closed.add(name)
        timeout_s = rng.choice([None, None, None, 0.05])
        driver.add(name, priority=rng.choice([0, 0, 1, -1]), timeout_s=timeout_s, **requests[name])
        for _ in range(rng.randint(0, 4)):
            steps(driver, 1)
            if gate.closed and rng.random() < 0.4:
                gate.closed.discard(rng.choice(sorted(gate.closed)))
            if rng.random() < 0.05:
                gate.closed.add(rng.choice(sorted(requests)))  # it matters if that one is preempted
            if rng.random() < 0.05:
                aborted.add(name)
                driver.abort(name)
    gate.closed.clear()
    driver.run()
    assert driver.scheduler._gates.num_deferrals["event"] > 5
    for name, request in requests.items():
        for index, expected in enumerate(generate_alone(**request) if name not in driver.refused else []):
            tokens = driver.tokens.get((name, index), [])
            ended_early = name in aborted or driver.finished[name, index] is FinishReason.TIMEOUT
            assert tokens == (expected[: len(tokens)] if ended_early else expected)
