"""Slots of adapters in the scheduler: which requests wait, which loads are ordered, and into which slots."""

from __future__ import annotations

from typing import Any

import pytest

from quire.adapter_orders import AdapterRef
from quire.config.adapters import AdaptersConfig
from quire.decoding.parallel import create_sequences
from quire.decoding.sequence import Request, RequestStatus
from quire.kv_cache.block_hash import ROOT
from quire.kv_cache.stats import EngineStats, add_up
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.scheduler.adapters import AdapterGate, AdapterSlots
from quire.scheduler.running import RunningSet

A, B, C = (AdapterRef(f"/{name}", name.encode()) for name in "abc")
QUOTE: Any = None


def request(adapter: AdapterRef | None, name: str = "r") -> Request:
    source = EngineRequest(
        request_id=name, prompt_token_ids=[1], params=SamplingParams(), max_tokens=1, seed=0, adapter=adapter
    )
    found = Request(source, 0.0)
    create_sequences(found, source, iter(range(9)))
    return found


class Slots:
    """A gate over slots, with the running set that they look at."""

    def __init__(self, num_slots: int = 2, max_running: int = 2) -> None:
        self.running = RunningSet()
        self.slots = AdapterSlots(self.running, AdaptersConfig(max_running, 16, num_slots))
        self.gate = AdapterGate(self.slots)

    def ask(self, adapter: AdapterRef | None, name: str = "r", now: float = 0.0) -> Any:
        return self.gate.check(request(adapter, name), QUOTE, now)

    def load(self, adapter: AdapterRef) -> int:
        assert self.ask(adapter) is not None
        orders = self.slots.take_orders(may_wait=False)
        assert orders is not None
        ((slot, ordered),) = orders.loads
        assert ordered == adapter
        self.slots.update([(slot, "")], [])
        return slot

    def run(self, adapter: AdapterRef) -> Request:
        found = request(adapter)
        assert self.gate.check(found, QUOTE, 0.0) is None
        self.running.enter(found, found.sequences)
        return found


def test_requests_without_an_adapter_pass() -> None:
    assert Slots().ask(None) is None


def test_one_load_for_all_who_wait() -> None:
    slots = Slots()
    first, second = slots.ask(A), slots.ask(A)
    orders = slots.slots.take_orders(may_wait=False)
    assert orders is not None
    assert [adapter for _, adapter in orders.loads] == [A]
    assert first.is_pending()
    assert slots.slots.take_orders(may_wait=False) is None, "ordered once"
    waiting = slots.slots.take_orders(may_wait=True)
    assert waiting is not None
    assert waiting.awaits_report
    assert not waiting.loads
    slots.slots.update([(orders.loads[0][0], "")], [])
    assert not first.is_pending()
    assert not second.is_pending()
    assert slots.ask(A) is None


def test_the_one_used_least_recently_gives_its_slot() -> None:
    slots = Slots()
    slot_of_a, slot_of_b = slots.load(A), slots.load(B)
    assert slot_of_a != slot_of_b
    slots.ask(A)  # used now
    assert slots.load(C) == slot_of_b
    assert slots.ask(A) is None
    assert slots.ask(B) is not None


def test_no_slot_of_a_running_request_is_given_away() -> None:
    slots = Slots(num_slots=1, max_running=1)
    slots.load(A)
    running = slots.run(A)
    deferral = slots.ask(B)
    assert slots.slots.take_orders(may_wait=False) is None
    assert deferral.is_pending()
    slots.running.leave(running)
    assert not deferral.is_pending()
    slots.load(B)


def test_no_more_adapters_than_may_run() -> None:
    slots = Slots(num_slots=2, max_running=1)
    slots.load(A)
    slots.load(B)
    running = slots.run(A)
    assert slots.ask(A) is None
    deferral = slots.ask(B)
    assert deferral.is_pending()
    slots.running.leave(running)
    assert not deferral.is_pending()
    assert slots.ask(B) is None


def test_a_load_that_fails() -> None:
    """Its requests are refused, and the slot is free."""
    slots = Slots(num_slots=1)
    waiting = [request(A), request(B), request(None)]
    assert slots.gate.check(waiting[0], QUOTE, 0.0) is not None
    orders = slots.slots.take_orders(may_wait=False)
    assert orders is not None
    slots.slots.update([(orders.loads[0][0], "it is damaged")], waiting)
    ((refused, error),) = slots.slots.take_refused()
    assert refused is waiting[0]
    assert error.message == "it is damaged"
    slots.load(B)


@pytest.mark.parametrize("adapter", [A, None])
def test_blocks_have_the_adapters_key(adapter: AdapterRef | None) -> None:
    assert request(adapter).extra_keys(16) == ({} if adapter is None else {ROOT: (b"adapter=a",)})


def test_a_flood_of_one_adapter_does_not_keep_others_out() -> None:
    """After a while no further request starts of the adapter that the fewest running ones use: it drains."""
    slots = Slots(num_slots=3, max_running=2)
    for adapter in (A, B, C):
        slots.load(adapter)
    running = [slots.run(A), slots.run(B), slots.run(B)]
    crowded_out = slots.ask(C, "waits", now=1.0)
    assert crowded_out.is_pending()
    assert slots.ask(A, "a", now=1.9) is None, "patience is not over"
    held = slots.ask(A, "a", now=2.0)
    assert held.is_pending()
    assert slots.ask(B, "b", now=2.0) is None, "one drains, and the others go on"
    assert slots.ask(None, "c", now=2.0) is None
    preempted = request(A, "d")
    preempted.status = RequestStatus.PREEMPTED
    assert slots.gate.check(preempted, QUOTE, 2.0) is None, "it has begun"
    slots.running.leave(running[0])
    assert not crowded_out.is_pending()
    assert slots.ask(C, "waits", now=2.1) is None
    slots.gate.forget(request(C, "waits"))
    assert not held.is_pending()


def test_a_request_that_ends_while_it_waits_holds_nothing_up() -> None:
    slots = Slots(num_slots=2, max_running=1)
    slots.load(A)
    slots.load(B)
    slots.run(A)
    slots.ask(B, "ends", now=0.0)
    held = slots.ask(A, "held", now=5.0)
    assert held.is_pending()
    slots.gate.forget(request(B, "ends"))
    assert not held.is_pending()
    assert slots.ask(A, "held", now=5.0) is None


def test_names_in_the_statistics() -> None:
    slots = Slots()
    sql, prose = AdapterRef("/a", b"a", "sql"), AdapterRef("/b", b"b", "prose")
    stats = EngineStats()
    slots.load(sql)
    slots.run(sql)
    slots.slots.report_stats(stats, [request(prose), request(prose), request(None)])
    assert (stats.max_running_adapters, stats.num_adapter_slots, stats.num_loaded_adapters) == (2, 2, 1)
    assert (stats.running_adapters, stats.waiting_adapters) == (["sql"], ["prose"])
    both = add_up([stats, EngineStats(running_adapters=["sql", "verse"])])
    assert both.running_adapters == ["sql", "verse"]


def test_slots_of_workers_that_dropped_their_weights_are_free() -> None:
    """A load under way has a slot too, and no result will report its end."""
    slots = Slots(num_slots=2)
    slots.load(A)
    assert slots.ask(B) is not None
    slots.slots.forget_workers()
    assert slots.slots.take_orders(may_wait=True) is None
    assert sorted((slots.load(B), slots.load(A))) == [1, 2]
