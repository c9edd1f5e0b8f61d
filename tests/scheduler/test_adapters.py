"""Slots of adapters in the scheduler: which requests wait, which loads are ordered, and into which slots."""

from __future__ import annotations

from typing import Any

import pytest

from quire.adapter_orders import AdapterRef
from quire.config.adapters import AdaptersConfig
from quire.decoding.parallel import create_sequences
from quire.decoding.sequence import Request
from quire.kv_cache.block_hash import ROOT
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.scheduler.adapters import AdapterGate, AdapterSlots
from quire.scheduler.running import RunningSet

A, B, C = (AdapterRef(f"/{name}", name.encode()) for name in "abc")
QUOTE: Any = None


def request(adapter: AdapterRef | None) -> Request:
    source = EngineRequest(
        request_id="r", prompt_token_ids=[1], params=SamplingParams(), max_tokens=1, seed=0, adapter=adapter
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

    def ask(self, adapter: AdapterRef | None) -> Any:
        return self.gate.check(request(adapter), QUOTE, 0.0)

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
