"""Clients take turns: what one of them has queued delays another's request by its share and no more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.decoding.sequence import Request
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.scheduler.queue import RequestQueue
from tests.fakes.core import CoreDriver, make_config

LOW, HIGH = 1, 0


class Served:
    """A queue from which requests start one after the other."""

    def __init__(self) -> None:
        self.queue = RequestQueue()
        self.now = 0.0
        self.num_arrived = 0
        self.started: list[Request] = []

    def arrive(self, client: str, priority: int = 0) -> Request:
        self.num_arrived += 1
        source = EngineRequest(
            request_id=f"{client}{self.num_arrived}",
            prompt_token_ids=[1],
            params=SamplingParams(),
            max_tokens=1,
            seed=0,
            client=client,
            priority=priority,
        )
        time = self.queue.order_time(client, priority, self.now)
        request = Request(source, self.now, arrival_number=self.num_arrived, order_time=time)
        self.queue.push(request)
        return request

    def start(self) -> Request:
        request = self.queue.first
        assert request is not None
        self.queue.remove(request)
        self.started.append(request)
        return request

    def first_of(self, client: str) -> Request | None:
        return next((request for request in self.queue if request.client == client), None)


EVENTS = st.lists(st.sampled_from(["A", "A", "A", "B", "C", "start", "start", "abort", "tick"]), max_size=120)


@given(EVENTS)
def test_the_first_request_of_a_client_waits_for_one_of_each_other(events: list[str]) -> None:
    served = Served()
    allowed: dict[str, int] = {}
    """Request that became its client's first -> requests that may start before it."""
    for event in events:
        if event == "tick":
            served.now += 0.5
        elif event in ("start", "abort"):
            if len(served.queue) == 0:
                continue
            if event == "abort":
                last = list(served.queue)[-1]
                served.queue.remove(last)
                continue
            request = served.start()
            assert served.first_of(request.client) is None or all(
                earlier.order_key < request.order_key or earlier.client != request.client
                for earlier in served.started[:-1]
            ), "the requests of a client keep their order"
            for name in allowed:
                allowed[name] -= 1
            assert allowed.pop(request.request_id, 0) >= -1
        else:
            others = {request.client for request in served.queue} - {event}
            is_first = served.first_of(event) is None
            request = served.arrive(event)
            if is_first:
                allowed[request.request_id] = len(others)
    keys = [request.order_key for request in served.queue]
    assert keys == sorted(keys)


@given(st.lists(st.sampled_from(["A", "A", "tick", "start"]), max_size=60))
def test_a_client_alone_is_served_as_it_comes_at_the_times_at_which_it_came(events: list[str]) -> None:
    served = Served()
    for event in events:
        if event == "tick":
            served.now += 0.5
        elif event == "start" and len(served.queue):
            served.start()
        elif event == "A":
            request = served.arrive("A")
            assert abs(request.order_time - served.now) < 0.001
    started = [request.order_key[1] for request in served.started]
    assert started == sorted(started)


def test_rounds() -> None:
    served = Served()
    for client in "AAAAABBC":
        served.now += 1.0
        served.arrive(client)
    served.start()
    served.arrive("C")
    order = "".join(request.client for request in served.queue)
    assert order == "BCABCAAA"


def test_priorities_stay_before_turns() -> None:
    served = Served()
    for client, priority in (("A", LOW), ("A", LOW), ("A", HIGH), ("B", LOW)):
        served.arrive(client, priority)
    found = [(request.client, request.priority) for request in served.queue]
    assert found == [("A", HIGH), ("A", LOW), ("B", LOW), ("A", LOW)]


def test_a_thousand_requests_of_one_key_do_not_delay_another_key_s_single_one() -> None:
    driver = CoreDriver(make_config(max_num_seqs=2, num_blocks=64))
    for number in range(200):
        driver.add(f"a{number}", [1, 2, 3], max_tokens=2, client="A")
    for _ in range(5):
        driver.step()
    driver.add("b", [4, 5, 6], max_tokens=2, client="B")
    waiting = [request.request_id for request in driver.core.scheduler._waiting]  # type: ignore[attr-defined]
    assert waiting.index("b") == 1
    driver.run()
