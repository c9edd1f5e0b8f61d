"""Replicas that are stopped and started again: the callers of their requests see nothing of it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from quire.config.options import EngineOptions
from quire.engine import fleet as fleets
from quire.engine import member
from quire.engine.client import EngineClient
from quire.engine.fleet import MAX_STARTS, Fleet
from quire.engine.inprocess_client import InProcessClient
from quire.engine.messages import AddRequest, Call, CallResult, EngineOutputs, EngineReady
from quire.errors import EngineDeadError
from quire.parallel.replica_memory import CommonMemory
from quire.request import FinishReason
from tests.engine.driving import add, call, stats, tokens_until_finished
from tests.engine.fleets import PATIENCE, Gated, note, owners, wait_for
from tests.engine.requests import FAKE, KINDS, Heard, hear, hear_rest, request, told

NUMBERS = itertools.count(1000)


@pytest.fixture(autouse=True, scope="module")
def looks_often() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(member, "WATCH_SECONDS", 0.002)
        yield


@pytest.fixture
def gated(options: EngineOptions) -> Iterator[Gated]:
    gated = Gated(options)
    yield gated
    gated.open()
    gated.fleet.shutdown()


def tell(fleet: Fleet, method: str, number: int, heard: Heard | None = None) -> CallResult:
    """Stop or start a replica; its answer. heard: takes the tokens that come meanwhile."""
    call_id = next(NUMBERS)
    fleet.send(Call(call_id, method, str(number)))
    while True:
        outputs = fleet.receive(PATIENCE)
        assert outputs is not None
        note(outputs.updates, {} if heard is None else heard)
        for result in outputs.results:
            if result.call_id == call_id:
                return result


@hypothesis_settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 1)), min_size=1, max_size=5), st.integers(1, 2))
def test_requests_of_stopped_replicas_get_equal_tokens(
    small: EngineOptions, stops: list[tuple[int, int]], queue_depth: int
) -> None:
    """stops: steps that the engines make before a stop, and the replica that is stopped and started again."""
    requests = [request(number, **KINDS[number % len(KINDS)]) for number in range(6)]
    alone = InProcessClient(small, executor=FAKE)
    expected = told(hear(alone, requests)[0])
    alone.shutdown()
    gated = Gated(msgspec.structs.replace(small, queue_depth=queue_depth))
    fleet, heard = gated.fleet, Heard()
    fleet.send(*map(AddRequest, requests))
    for num_steps, number in stops:
        for engine in (gated[0], gated[1]):
            engine.let(num_steps)
        wait_for(lambda: gated[0].is_waiting and gated[1].is_waiting)
        assert tell(fleet, "stop_replica", number, heard).value == 0
        assert gated[number].was_shut_down
        assert not fleet.members[number].entries
        assert tell(fleet, "start_replica", number, heard).value == 1
    gated.open()
    assert not hear_rest(fleet, requests, heard)
    assert told(heard) == expected
    assert stats(fleet).num_used_blocks == 0
    assert call(fleet, "check").error is None
    fleet.shutdown()


def test_a_stopped_replica_gets_nothing_until_it_is_started(gated: Gated) -> None:
    fleet = gated.fleet
    assert tell(fleet, "stop_replica", 1).value == tell(fleet, "stop_replica", 1).value == 0
    fleet.send(add("a"), add("b"))
    assert owners(fleet, "a", "b") == [0, 0]
    gated.open()
    tokens_until_finished(fleet, "a", "b")
    assert stats(fleet).finished_requests_total == 2
    assert not fleet.is_restarting
    assert tell(fleet, "start_replica", 1).value == tell(fleet, "start_replica", 1).value == 1
    fleet.send(add("c"), add("d"))
    assert sorted(owners(fleet, "c", "d")) == [0, 1]


def test_the_last_replica_that_is_up_is_not_stopped(gated: Gated) -> None:
    assert tell(gated.fleet, "stop_replica", 0).value == 0
    error = tell(gated.fleet, "stop_replica", 1).error
    assert error == "replica 1 cannot be stopped: none of the others is up to go on with its requests"
    assert gated.fleet.members[1].takes_new


def test_a_prefix_of_a_stopped_replica_is_registered_at_the_other(gated: Gated) -> None:
    fleet, heard = gated.fleet, Heard()
    prefix = msgspec.structs.replace(request(3, max_tokens=1), register_prefix=True)
    fleet.send(AddRequest(prefix))
    [owner] = owners(fleet, "r3")
    gated.step(owner, heard)
    assert heard["r3", 0][-1].finish_reason is FinishReason.LENGTH
    tell(fleet, "stop_replica", owner)
    assert owners(fleet, "r3") == [1 - owner]
    gated[1 - owner].let(1)
    wait_for(lambda: fleet._entries["r3"].is_over)


def test_a_replica_that_does_not_start_says_so(gated: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "PAUSE_SECONDS", 0.0)
    tell(gated.fleet, "stop_replica", 1)

    def fail(_ready: object, _stats: object) -> EngineClient:
        raise EngineDeadError("no memory")

    gated.fleet.members[1].start = fail
    assert tell(gated.fleet, "start_replica", 1).value == 0
    assert gated.fleet.members[0].takes_new


def test_a_replica_is_stopped_while_it_waits_for_its_next_start(gated: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests do not wait for it any longer."""
    monkeypatch.setattr(fleets, "PAUSE_SECONDS", 1000.0)
    fleet, tries = gated.fleet, []

    def fail(_ready: object, _stats: object) -> EngineClient:
        tries.append(1)
        raise EngineDeadError("no memory")

    fleet.members[1].start = fail
    fleet.send(add("a"), add("b"))
    assert owners(fleet, "a", "b") == [0, 1]
    gated[1].kill()
    wait_for(lambda: bool(tries))
    assert tell(fleet, "stop_replica", 1).value == 0
    assert owners(fleet, "a", "b") == [0, 0]
    gated.open()
    tokens_until_finished(fleet, "a", "b")


def test_a_stop_is_answered_when_the_requests_are_elsewhere(gated: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop comes between the failure of a start and the moment when the fleet notes it."""
    monkeypatch.setattr(fleets, "PAUSE_SECONDS", 1000.0)
    fleet, at_answers = gated.fleet, []
    arrived = fleet._arrived.put

    def put(parts: fleets.Parts) -> None:
        if parts[0].results:
            at_answers.append(owners(fleet, "a", "b"))
        arrived(parts)

    def fail(_ready: object, _stats: object) -> EngineClient:
        fleet.send(Call(next(NUMBERS), "stop_replica", "1"))
        raise EngineDeadError("no memory")

    monkeypatch.setattr(fleet, "_arrived", SimpleNamespace(put=put, get=fleet._arrived.get))
    fleet.members[1].start = fail
    fleet.send(add("a"), add("b"))
    gated[1].kill()
    wait_for(lambda: bool(at_answers))
    assert at_answers == [[0, 0]]


def test_two_stops_at_once_leave_one_replica(gated: Gated) -> None:
    """The second one comes before the first engine has ended."""
    first, second = next(NUMBERS), next(NUMBERS)
    gated.fleet.send(Call(first, "stop_replica", "0"), Call(second, "stop_replica", "1"))
    answers: dict[int, CallResult] = {}
    while len(answers) < 2:
        outputs = gated.fleet.receive(PATIENCE)
        assert outputs is not None
        answers |= {result.call_id: result for result in outputs.results}
    assert answers[first].value == 0
    assert "none of the others is up" in str(answers[second].error)
    assert gated.fleet.members[1].takes_new


def test_a_start_while_the_engine_ends_is_answered_when_the_next_one_is_up(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, member, at_answers = gated.fleet, gated.fleet.members[1], []
    arrived, shutdown = fleet._arrived.put, gated[1].shutdown

    def put(parts: fleets.Parts) -> None:
        for result in parts[0].results:
            at_answers.append((result.value, len(gated.engines[1]), fleet.num_restarts))
        arrived(parts)

    def end(timeout: float = 5.0) -> None:
        if not gated.engines[1][0].was_shut_down:
            fleet.send(Call(next(NUMBERS), "start_replica", "1"))
            assert not member.takes_new
        shutdown(timeout)

    monkeypatch.setattr(fleet, "_arrived", SimpleNamespace(put=put, get=fleet._arrived.get))
    monkeypatch.setattr(gated[1], "shutdown", end)
    fleet.send(add("a"), add("b"))
    fleet.send(Call(next(NUMBERS), "stop_replica", "1"))
    wait_for(lambda: len(at_answers) == 2)
    assert at_answers == [(1, 2, 1)] * 2
    assert not member.search.has_suspects, "a stop is no death"
    gated.open()
    tokens_until_finished(fleet, "a", "b")


def test_engines_that_others_end_as_they_start_are_not_failed_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replica 0 dies as replica 1 starts, more often than a start may fail; then both come up."""
    monkeypatch.setattr(fleets, "PAUSE_SECONDS", 0.001)
    num_deaths = MAX_STARTS + 2
    starting = [threading.Event() for _ in range(num_deaths + 1)]

    class Engine:
        silence, stopped = 0.0, None

        def __init__(self, number: int, turn: int) -> None:
            self.number, self.turn, self.has_ended = number, turn, threading.Event()

        @property
        def ready(self) -> EngineReady:
            if self.number and self.turn < num_deaths:
                starting[self.turn].set()
                assert self.has_ended.wait(PATIENCE)
                raise EngineDeadError("it was ended")
            return EngineReady(100, num_blocks=40, block_size=16, seconds={}, backend="")

        def receive(self, timeout: float | None = None) -> EngineOutputs | None:
            if not self.number and self.turn < num_deaths:
                assert starting[self.turn].wait(PATIENCE)
                raise EngineDeadError("it died")
            assert not self.has_ended.wait(0.001 if timeout is None else min(timeout, 0.001))
            return None

        def send(self, *messages: object) -> None: ...

        def shutdown(self, timeout: float = 0.0) -> None:
            self.has_ended.set()

    turns = [itertools.count(), itertools.count()]
    starts: Any = [lambda _ready, _stats, number=number: Engine(number, next(turns[number])) for number in range(2)]
    fleet = Fleet(starts, router="round-robin", common=CommonMemory(2))
    try:
        wait_for(lambda: all(member.is_up for member in fleet.members) and fleet.num_restarts > num_deaths)
        assert not any(member.is_lost for member in fleet.members)
    finally:
        fleet.shutdown()
