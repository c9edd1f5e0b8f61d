"""Engines that die at any step: every request goes on with the tokens that it would have had."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from quire.config.options import EngineOptions
from quire.engine.fleet import MAX_FRUITLESS_DEATHS, Fleet
from quire.engine.inprocess_client import InProcessClient
from quire.engine.messages import Abort, AddRequest, Call, EngineReady
from quire.errors import EngineDeadError, InternalError, ModelLoadError
from quire.kv_cache.stats import EngineStats
from quire.request import FinishReason
from tests.engine.driving import add, call, stats, tokens_until_finished
from tests.engine.requests import KINDS, Heard, hear, hear_rest, request, told
from tests.fakes.mortal import FAKE, MortalClient


def receive_updates(client: Fleet, heard: Heard, num_steps: int) -> None:
    for _ in range(num_steps):
        outputs = client.receive(30)
        assert outputs is not None
        for update in outputs.updates:
            heard.setdefault((update.request_id, update.index), []).append(update)


def restarting(
    options: EngineOptions, is_due: Callable[[set[str]], bool], *, loses: bool = False, hung_engine_timeout: float = 0.0
) -> tuple[Fleet, list[MortalClient]]:
    engines: list[MortalClient] = []

    def start(ready: EngineReady | None, counted: EngineStats | None) -> MortalClient:
        engines.append(MortalClient(options, FAKE, is_due, loses=loses))
        return engines[-1]

    return Fleet([start], hung_engine_timeout=hung_engine_timeout), engines


def due_at(steps: list[int]) -> Callable[[set[str]], bool]:
    """Deaths, each that number of steps behind the one before."""
    left = list(steps)

    def is_due(_request_ids: set[str]) -> bool:
        if left:
            left[0] -= 1
            if left[0] < 0:
                left.pop(0)
                return True
        return False

    return is_due


@pytest.fixture(scope="module")
def undisturbed(small: EngineOptions) -> dict[tuple[str, int], object]:
    client = InProcessClient(small, executor=FAKE)
    requests = [request(number, **KINDS[number % len(KINDS)]) for number in range(12)]
    heard, rejected = hear(client, requests)
    assert not rejected
    assert stats(client).swap_preemptions_total > 0, "the requests are to be swapped as well"
    client.shutdown()
    return told(heard)


CLEARS_ANY = 20
"""Steps that clear each of the requests of suspicion when it runs alone."""


@hypothesis_settings(max_examples=20)
@given(steps=st.lists(st.integers(0, 40), min_size=1, max_size=8), loses=st.booleans(), queue_depth=st.integers(1, 2))
def test_deaths_at_any_step_change_nothing(
    small: EngineOptions,
    undisturbed: dict[tuple[str, int], object],
    steps: list[int],
    loses: bool,
    queue_depth: int,
) -> None:
    options = msgspec.structs.replace(small, queue_depth=queue_depth)
    client, engines = restarting(options, due_at(steps), loses=loses)
    requests = [request(number, **KINDS[number % len(KINDS)]) for number in range(12)]
    heard, rejected = hear(client, requests)
    if rejected:
        assert any(step <= CLEARS_ANY for step in steps[1:]), "a request had time to clear itself, and was ended"
    lost = {each.request_id for each in rejected}
    expected = {key: value for key, value in undisturbed.items() if key[0] not in lost}
    assert {key: value for key, value in told(heard).items() if key[0] not in lost} == expected
    assert client.num_restarts == len(engines) - 1
    assert call(client, "check").error is None
    assert stats(client).num_used_blocks == 0
    client.shutdown()


@hypothesis_settings(max_examples=12)
@given(culprits=st.sets(st.integers(0, 11), min_size=1, max_size=2))
def test_the_request_that_ends_every_engine_is_found_and_ended(
    small: EngineOptions, undisturbed: dict[tuple[str, int], object], culprits: set[int]
) -> None:
    names = {f"r{number}" for number in culprits}
    client, _ = restarting(small, lambda request_ids: bool(names & request_ids))
    requests = [request(number, **KINDS[number % len(KINDS)]) for number in range(12)]
    heard, rejected = hear(client, requests)
    assert {each.request_id for each in rejected} == names
    for each in rejected:
        error = each.error()
        assert isinstance(error, InternalError)
        assert "the engine died whenever it ran this request" in error.summary
        assert "killed by the test" in str(error)
    assert told(heard) == {key: value for key, value in undisturbed.items() if key[0] not in names}
    client.shutdown()


def test_a_request_that_comes_while_others_are_tried_is_served(small: EngineOptions) -> None:
    client, _ = restarting(small, lambda request_ids: "r0" in request_ids)
    first = [request(0, max_tokens=5), request(1, max_tokens=5)]
    for each in first:
        client.send(AddRequest(each))
    client.receive(5)  # after two deaths r0 and r1 are tried, one at a time
    client.send(AddRequest(request(2, max_tokens=5)))
    tokens = {"r1": 0, "r2": 0}
    while min(tokens.values()) < 5:
        outputs = client.receive(5)
        assert outputs is not None
        for update in outputs.updates:
            tokens[update.request_id] += len(update.new_token_ids)
    client.shutdown()


def test_a_call_for_all_requests_reaches_those_that_a_search_keeps_back(small: EngineOptions) -> None:
    client, engines = restarting(small, due_at([1, 1]))
    requests = [request(number, max_tokens=60) for number in range(4)]
    for each in requests:
        client.send(AddRequest(each))
    heard: Heard = {}
    while len(engines) < 3 or not client.members[0].search.is_searching:
        receive_updates(client, heard, 1)
    assert not all(entry.is_sent for entry in client._entries.values())
    client.send(Call(7, "abort_all"))
    assert not hear_rest(client, requests, heard)
    assert {updates[-1].finish_reason for updates in heard.values()} == {FinishReason.ABORT}
    client.shutdown()


def test_aborted_sequences_and_requests_stay_aborted(small: EngineOptions) -> None:
    client, engines = restarting(small, due_at([4]))
    client.send(AddRequest(request(0, max_tokens=20, n=2)))
    client.send(AddRequest(request(1, max_tokens=20)))
    for _ in range(2):
        client.receive(5)
    client.send(Abort("r0", 1))
    client.send(Abort("r1"))
    ended = []
    while not ended:
        outputs = client.receive(5)
        assert outputs is not None
        updates = [update for update in outputs.updates if engines[1:]]
        assert {(update.request_id, update.index) for update in updates} <= {("r0", 0)}
        ended = [update for update in updates if update.finish_reason is not None]
    assert len(engines) == 2
    client.shutdown()


def test_an_engine_that_hangs_is_ended_and_another_one_goes_on(
    small: EngineOptions, undisturbed: dict[tuple[str, int], object]
) -> None:
    client, engines = restarting(small, due_at([]), hung_engine_timeout=60.0)
    requests = [request(number, **KINDS[number % len(KINDS)]) for number in range(12)]
    for each in requests:
        client.send(AddRequest(each))
    heard: Heard = {}
    receive_updates(client, heard, 7)
    engines[0].silence = 59.9
    assert client.receive(0) is None
    assert not engines[0].was_shut_down, "it may come back"
    engines[0].silence = 60.0
    assert not hear_rest(client, requests, heard)
    assert told(heard) == undisturbed
    assert engines[0].was_shut_down
    assert (len(engines), client.num_restarts) == (2, 1)
    client.shutdown()


def test_without_the_limit_an_engine_that_hangs_is_left_alone(small: EngineOptions) -> None:
    client, engines = restarting(small, due_at([]))
    client.send(AddRequest(request(0, max_tokens=5)))
    assert client.receive(5) is not None
    engines[0].silence = 1e6
    assert client.receive(0.01) is None
    engines[0].silence = 0.0
    assert client.receive(5) is not None
    assert len(engines) == 1
    client.shutdown()


class HeldStart:
    """Engines after the first start when the test lets them."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self.engines: list[MortalClient] = []
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self, ready: EngineReady | None, counted: EngineStats | None) -> MortalClient:
        if ready is not None:
            self.has_begun.set()
            assert self.may_end.wait(120)
        is_due = due_at([3]) if ready is None else due_at([])
        self.engines.append(MortalClient(self._options, FAKE, is_due, loses=False))
        return self.engines[-1]


def test_what_is_sent_and_aborted_while_an_engine_starts(small: EngineOptions) -> None:
    start = HeldStart(small)
    client = Fleet([start])
    requests = [request(number, max_tokens=8) for number in range(4)]
    with ThreadPoolExecutor(1) as pool:
        for each in requests[:3]:
            client.send(AddRequest(each))
        heard: Heard = {}
        hearing = pool.submit(hear_rest, client, [requests[0], requests[2]], heard)
        assert start.has_begun.wait(120)
        assert client.is_restarting
        client.send(Abort("r1"))
        client.send(AddRequest(requests[3]))
        client.send(Abort("r3"))
        client.send(Abort("unknown"))
        client.send(Call(5, "stats"))
        start.may_end.set()
        hearing.result(120)
    alone = InProcessClient(small, executor=FAKE)
    expected = told(hear(alone, requests[:3])[0])
    assert told({key: value for key, value in heard.items() if key[0] != "r1"}) == {
        key: value for key, value in expected.items() if key[0] != "r1"
    }
    assert ("r3", 0) not in heard
    assert start.engines[1].request_ids == {"r0", "r2"}, "the engine does not hear of what is over"
    assert stats(client).num_used_blocks == 0
    client.shutdown()


def test_shutdown_while_an_engine_starts(small: EngineOptions) -> None:
    start = HeldStart(small)
    client = Fleet([start])
    with ThreadPoolExecutor(1) as pool:
        hearing = pool.submit(hear, client, [request(0, max_tokens=8)])
        assert start.has_begun.wait(120)
        client.shutdown()
        start.may_end.set()
        with pytest.raises(EngineDeadError, match="the engine was shut down"):
            hearing.result(120)
    assert [engine.was_shut_down for engine in start.engines] == [True, True]
    with pytest.raises(EngineDeadError, match="the engine was shut down"):
        client.send(Abort("r0"))


def test_requests_that_a_pause_keeps_are_kept_by_the_next_engine(
    small: EngineOptions, undisturbed: dict[tuple[str, int], object]
) -> None:
    client, engines = restarting(small, due_at([12]))
    first = request(0, **KINDS[0])
    client.send(AddRequest(first))
    heard: Heard = {}
    receive_updates(client, heard, 4)
    client.send(Call(1, "pause", "all"))
    while len(engines) < 2:
        outputs = client.receive(0.01)
        for update in outputs.updates if outputs is not None else ():  # planned before the pause
            heard["r0", 0].append(update)
    assert call(client, "is_paused").value == 2
    num_steps = stats(client).steps_total
    for _ in range(3):
        client.receive(0.01)
    assert stats(client).steps_total == num_steps
    client.send(Call(2, "resume"))
    hear_rest(client, [first], heard)
    assert told(heard) == {("r0", 0): undisturbed["r0", 0]}
    client.shutdown()


def test_prefixes_and_open_calls_and_counters_go_on(small: EngineOptions) -> None:
    client, engines = restarting(small, due_at([6]))
    prefix = msgspec.structs.replace(request(3, max_tokens=1), register_prefix=True)
    hear(client, [prefix])
    before = stats(client)
    assert before.num_registered_blocks > 0
    hear(client, [request(4, max_tokens=20)])
    assert len(engines) == 2
    after = stats(client)
    assert after.num_registered_blocks == before.num_registered_blocks
    assert after.steps_total > before.steps_total
    assert after.finished_requests_total == 3, "the prefix twice"
    client.send(Call(8, "unregister_prefix", "r3"))
    outputs = client.receive(5)
    assert outputs is not None
    assert outputs.results[0].error is None
    client.shutdown()


def test_an_engine_that_slept_sleeps_again(small: EngineOptions) -> None:
    client, engines = restarting(small, due_at([2]))
    client.send(Call(1, "sleep", "1"))
    outputs = client.receive(5)
    assert outputs is not None
    assert outputs.results[0].error is None
    assert call(client, "is_sleeping").value == 1
    while len(engines) < 2:
        client.receive(0.01)
    assert call(client, "is_sleeping").value == 1
    assert call(client, "wake_up", "weights").value == 1
    client.send(Call(2, "wake_up", "kv_cache"))
    outputs = client.receive(5)
    assert outputs is not None
    assert outputs.results[0].error is None
    assert tokens_until_finished(_with(client, add("a")), "a")["a"]
    client.shutdown()


def test_under_a_pause_what_has_begun_goes_on_and_new_requests_wait(small: EngineOptions) -> None:
    client, engines = restarting(small, due_at([8]))
    client.send(AddRequest(request(0, max_tokens=20)))
    for _ in range(3):
        client.receive(5)
    client.send(Call(1, "pause", "new"))
    client.send(AddRequest(request(1, max_tokens=5)))
    ended: list[str] = []
    while not ended:
        outputs = client.receive(5)
        assert outputs is not None
        ended += [update.request_id for update in outputs.updates if update.finish_reason is not None]
    assert ended == ["r0"]
    assert len(engines) == 2
    assert stats(client).num_waiting == 1
    client.send(Call(2, "resume"))
    while ended == ["r0"]:
        outputs = client.receive(5)
        assert outputs is not None
        ended += [update.request_id for update in outputs.updates if update.finish_reason is not None]
    assert ended == ["r0", "r1"]
    client.shutdown()


def _with(client: Fleet, message: AddRequest) -> Fleet:
    client.send(message)
    return client


def test_an_engine_that_dies_without_a_token_is_given_up(small: EngineOptions) -> None:
    client, engines = restarting(small, lambda _request_ids: True)
    with pytest.raises(EngineDeadError, match="21 times in a row without a token"):
        client.receive(5)
    assert len(engines) == MAX_FRUITLESS_DEATHS + 1
    with pytest.raises(EngineDeadError, match="21 times"):
        client.send(add("a"))
    client.shutdown()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModelLoadError("the checkpoint is gone"), "the checkpoint is gone"),
        (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "no more threads can be started"),
    ],
)
def test_an_engine_that_cannot_start_again_is_given_up(
    small: EngineOptions, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    monkeypatch.setattr("quire.engine.fleet.PAUSE_SECONDS", 0.001)
    num_starts = 0

    def start(ready: EngineReady | None, counted: EngineStats | None) -> MortalClient:
        nonlocal num_starts
        num_starts += 1
        if ready is not None:
            raise error
        return MortalClient(small, FAKE, lambda _request_ids: True, loses=False)

    client = Fleet([start])
    client.send(add("a"))
    with pytest.raises(EngineDeadError, match=f"could not be started again: {reason}.*: killed by the test"):
        client.receive(5)
    assert num_starts == 4
    client.shutdown()
