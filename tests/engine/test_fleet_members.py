"""Several engines as one: requests are spread and move, answers become one, and what one engine meets is its own."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from quire.config.options import EngineOptions
from quire.engine.client import EngineClient
from quire.engine.fleet import Fleet, Parts
from quire.engine.inprocess_client import InProcessClient
from quire.engine.messages import Abort, AddRequest, Call, EngineOutputs, EngineReady
from quire.engine.process_client import ProcessClient
from quire.engine.router import PREFIX_TOKENS
from quire.errors import ConfigError, EngineDeadError, InternalError, ModelLoadError, UserError
from quire.kv_cache.stats import EngineStats, add_up, carry_over
from quire.parallel.replica_memory import CommonMemory
from quire.request import FinishReason
from tests.engine.driving import add, call, stats, tokens_until_finished
from tests.engine.fleets import PATIENCE, Gated, note, owners, started, wait_for
from tests.engine.requests import FAKE, KINDS, Heard, hear, hear_rest, request, told
from tests.fakes.mortal import MortalClient

Make = Callable[..., Fleet]


@pytest.fixture
def make(options: EngineOptions) -> Iterator[Make]:
    made: list[Fleet] = []

    def fleet(*executors: str, router: str = "round-robin", restarts: bool = True) -> Fleet:
        def starter(executor: str) -> Callable[..., InProcessClient]:
            return lambda _ready, _stats: InProcessClient(options, executor=f"tests.fakes.factories:{executor}")

        made.append(Fleet([starter(each) for each in executors], router=router, restarts=restarts))
        return started(made[-1])

    yield fleet
    for each in made:
        each.shutdown()


@pytest.fixture
def gated(options: EngineOptions) -> Iterator[Gated]:
    gated = Gated(options)
    yield gated
    gated.open()
    gated.fleet.shutdown()


def receive_until(client: EngineClient, is_enough: Callable[[Sequence[EngineOutputs]], bool]) -> list[EngineOutputs]:
    received: list[EngineOutputs] = []
    while not is_enough(received):
        outputs = client.receive(PATIENCE)
        assert outputs is not None
        received.append(outputs)
    return received


# Spreading.


def test_requests_are_spread_and_finish_as_on_one_engine(make: Make, options: EngineOptions) -> None:
    alone = InProcessClient(options, executor=FAKE)
    names = [f"r{number}" for number in range(7)]
    for number, name in enumerate(names):
        alone.send(add(name, num_prompt_tokens=5 + number))
    expected = tokens_until_finished(alone, *names)
    fleet = make("plain", "plain", "plain")
    for number, name in enumerate(names):
        fleet.send(add(name, num_prompt_tokens=5 + number))
    assert tokens_until_finished(fleet, *names) == expected
    assert fleet._entries == fleet._names == {}
    assert [len(member.entries) for member in fleet.members] == [0, 0, 0]
    total = stats(fleet)
    assert total.finished_requests_total == 7
    assert total.num_blocks == 3 * stats(alone).num_blocks
    assert total.block_size == stats(alone).block_size
    assert fleet.ready.num_blocks == 3 * alone.ready.num_blocks
    assert fleet.ready.backend.endswith("3 replicas")


def test_requests_that_begin_alike_share_a_replica(make: Make) -> None:
    fleet = make("slow", "slow", "slow", router="prefix-aware")
    for name in "abc":
        fleet.send(add(name, num_prompt_tokens=PREFIX_TOKENS + 10, max_tokens=1000))
    for name in "xy":
        fleet.send(add(name, num_prompt_tokens=PREFIX_TOKENS - 1, max_tokens=1000))
    alike, others = owners(fleet, *"abc"), owners(fleet, *"xy")
    assert len(set(alike)) == 1
    assert len({*alike, *others}) == 3, "short requests go to the least loaded"


def test_abort_reaches_the_request_and_frees_its_place(make: Make) -> None:
    fleet = make("slow", "slow", router="least-loaded")
    for name in "abcd":
        fleet.send(add(name, max_tokens=100_000))
    assert owners(fleet, *"abcd") == [0, 1, 0, 1]
    for name in "bd":
        fleet.send(Abort(name))
    fleet.send(Abort("never heard of"))
    fleet.send(add("e", max_tokens=2))
    assert owners(fleet, "e") == [1]
    receive_until(fleet, lambda _: "e" not in fleet._entries)
    fleet.send(Abort("a"))
    fleet.send(Abort("c"))
    assert call(fleet, "check").error is None
    assert stats(fleet).num_used_blocks == 0


def test_a_request_of_several_sequences_ends_with_the_last(make: Make) -> None:
    fleet = make("plain", "plain")
    message = add("a")
    params = msgspec.structs.replace(message.request.params, n=3, temperature=1.0)
    fleet.send(AddRequest(msgspec.structs.replace(message.request, params=params)))
    heard: Heard = {}
    hear_rest(fleet, [AddRequest(msgspec.structs.replace(message.request, params=params)).request], heard)
    assert [updates[-1].finish_reason for updates in heard.values()] == [FinishReason.LENGTH] * 3
    assert fleet._entries == {}


# Calls.


def test_calls_are_answered_by_all(make: Make) -> None:
    fleet = make("plain", "plain")
    for name in "abcd":
        fleet.send(add(name, num_prompt_tokens=40))
    tokens_until_finished(fleet, *"abcd")
    cached = stats(fleet).num_cached_blocks
    assert cached > 0
    assert call(fleet, "reset_prefix_cache").value == cached
    assert call(fleet, "sleep", "1").value == 1
    assert call(fleet, "is_sleeping").value == 1
    assert call(fleet, "wake_up").error is None
    assert call(fleet, "is_sleeping").value == 0
    snapshot = call(fleet, "kv_snapshot")
    assert snapshot.kv is not None, "of the first that is up"
    assert call(fleet, "unknown").error == "unknown method 'unknown'"


def test_all_engines_sleep_or_none(gated: Gated) -> None:
    """One refuses, because it has a request."""
    gated.fleet.send(add("a", max_tokens=50))
    gated.step(0, {})
    gated[1].open()
    gated.fleet.send(Call(7, "sleep", "1"))
    gated[0].open()
    received = receive_until(gated.fleet, lambda received: any(outputs.results for outputs in received))
    [result] = received[-1].results
    assert "cannot sleep while requests live" in str(result.error)
    assert call(gated.fleet, "is_sleeping").value == 0
    gated.fleet.send(add("b"), add("c"))
    receive_until(gated.fleet, lambda _: not gated.fleet._entries)


def test_an_answer_of_all_engines_comes_behind_what_they_sent_before_it(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second engine answers while the first one's thread hands over its outputs."""
    fleet, arrived, is_answered = gated.fleet, gated.fleet._arrived.put, threading.Event()

    def put(parts: Parts) -> None:
        if parts[0].updates and not parts[0].results:
            gated[1].let(1)
            is_answered.wait(0.2)  # comes only if the threads do not take turns
        arrived(parts)
        if parts[0].results:
            is_answered.set()

    fleet.send(add("a"), add("b"))
    for number in range(2):
        gated.step(number, {})
    monkeypatch.setattr(fleet, "_arrived", SimpleNamespace(put=put, get=fleet._arrived.get))
    fleet.send(Call(7, "abort_all"))
    gated[0].let(1)
    received = receive_until(fleet, lambda received: any(outputs.results for outputs in received))
    assert received[-1].results[0].value == 2
    assert {update.request_id for outputs in received for update in outputs.updates} == {"a", "b"}


def test_an_engine_that_starts_during_a_shutdown_is_shut_down(options: EngineOptions) -> None:
    has_begun, may_end, engines = threading.Event(), threading.Event(), list[MortalClient]()

    def start(*_: object) -> MortalClient:
        if threading.current_thread().name == "replica 1":
            has_begun.set()
            assert may_end.wait(PATIENCE)
        engines.append(MortalClient(options, FAKE, never, loses=False))
        return engines[-1]

    fleet = Fleet([start, start])
    assert has_begun.wait(PATIENCE)
    fleet.shutdown()
    may_end.set()
    wait_for(lambda: [engine.was_shut_down for engine in engines] == [True, True])


def test_a_registered_prefix_is_of_one_replica_and_survives_it(gated: Gated) -> None:
    message = add("p", num_prompt_tokens=40, max_tokens=1)
    gated.fleet.send(add("a"), AddRequest(msgspec.structs.replace(message.request, register_prefix=True)))
    gated.open()
    tokens_until_finished(gated.fleet, "a", "p")
    registered = stats(gated.fleet).num_registered_blocks
    assert registered > 0
    gated[1].kill()
    wait_for(lambda: gated.fleet.num_restarts == 1)
    gated.open()
    wait_for(lambda: stats(gated.fleet).num_registered_blocks == registered)
    gated.fleet.send(Abort("p"))
    assert stats(gated.fleet).num_registered_blocks == registered, "the request is over, the prefix is not"
    for error in (None, "no prefix 'p' is registered"):
        assert call(gated.fleet, "unregister_prefix", "p").error == error
    assert stats(gated.fleet).num_registered_blocks == 0


# Deaths.


def mortal(
    options: EngineOptions, *is_due: Callable[[set[str]], bool], loses: bool = False
) -> tuple[Fleet, Counter[int]]:
    """A fleet whose members' engines die when it is due, and how many engines each has had."""
    started_engines: Counter[int] = Counter()

    def starter(number: int) -> Callable[..., MortalClient]:
        def start(_ready: EngineReady | None, _stats: EngineStats | None) -> MortalClient:
            started_engines[number] += 1
            return MortalClient(options, FAKE, is_due[number], loses=loses)

        return start

    return started(Fleet([starter(number) for number in range(len(is_due))], router="round-robin")), started_engines


def never(_request_ids: set[str]) -> bool:
    return False


@pytest.fixture(scope="module")
def undisturbed(small: EngineOptions) -> dict[tuple[str, int], object]:
    client = InProcessClient(small, executor=FAKE)
    heard, rejected = hear(client, [request(number, **KINDS[number % len(KINDS)]) for number in range(12)])
    assert not rejected
    client.shutdown()
    return told(heard)


@hypothesis_settings(max_examples=12)
@given(
    first=st.lists(st.integers(25, 60), max_size=2),
    second=st.lists(st.integers(25, 60), max_size=2),
    loses=st.booleans(),
)
def test_deaths_of_either_change_nothing(
    small: EngineOptions,
    undisturbed: dict[tuple[str, int], object],
    first: list[int],
    second: list[int],
    loses: bool,
) -> None:
    def due(steps: list[int]) -> Callable[[set[str]], bool]:
        left = list(steps)

        def is_due(request_ids: set[str]) -> bool:
            left[:1] = [left[0] - 1] if left and request_ids else left[:1]
            return bool(left) and left[0] < 0 and left.pop(0) < 0

        return is_due

    fleet, engines = mortal(small, due(first), due(second), loses=loses)
    heard, rejected = hear(fleet, [request(number, **KINDS[number % len(KINDS)]) for number in range(12)])
    assert not rejected
    assert told(heard) == undisturbed
    assert fleet.num_restarts == engines[0] + engines[1] - 2
    assert call(fleet, "check").error is None
    assert stats(fleet).num_used_blocks == 0
    fleet.shutdown()


def test_vectors_are_computed_again(small: EngineOptions) -> None:
    requests = [request(number, pooling=True, max_tokens=1) for number in range(9)]
    alone = InProcessClient(small, executor=FAKE)
    expected = told(hear(alone, requests)[0])
    left = [2, 1]

    def is_due(request_ids: set[str]) -> bool:
        return bool(left) and len(request_ids) > left[0] and bool(left.pop(0))

    fleet, _ = mortal(small, is_due, never)
    heard, rejected = hear(fleet, requests)
    assert not rejected
    assert told(heard) == expected
    assert fleet.num_restarts > 0
    fleet.shutdown()


def test_a_request_that_ends_every_engine_ends_those_of_its_member_alone(
    small: EngineOptions, undisturbed: dict[tuple[str, int], object]
) -> None:
    undisturbed = dict(undisturbed)

    def is_due(request_ids: set[str]) -> bool:
        return "r2" in request_ids

    fleet, engines = mortal(small, is_due, is_due)
    heard, rejected = hear(fleet, [request(number, **KINDS[number % len(KINDS)]) for number in range(12)])
    [culprit] = rejected
    assert culprit.request_id == "r2"
    assert isinstance(culprit.error(), InternalError)
    for known in (heard, undisturbed):
        for key in [key for key in known if key[0] == "r2"]:
            del known[key]  # type: ignore[attr-defined]
    assert told(heard) == undisturbed
    assert engines[0] > 3
    assert engines[1] == 1, "the other one has never died"
    fleet.shutdown()


def test_new_requests_go_to_the_member_that_is_up_while_the_other_one_starts(small: EngineOptions) -> None:
    may_start = threading.Event()
    may_start.set()
    clients: list[MortalClient] = []

    def start(_ready: EngineReady | None, _stats: EngineStats | None) -> MortalClient:
        assert may_start.wait(PATIENCE)
        is_last = len(clients) == 2
        clients.append(MortalClient(small, FAKE, lambda request_ids: "r0" in request_ids and not is_last, loses=False))
        return clients[-1]

    fleet = started(Fleet([start, start], router="round-robin"))
    may_start.clear()
    first = request(0, max_tokens=20)
    fleet.send(AddRequest(first))
    wait_for(lambda: fleet.members[0].death is not None)
    assert not fleet.is_restarting, "one is up"
    waiting = [request(number, max_tokens=5) for number in range(1, 5)]
    heard, rejected = hear(fleet, waiting)
    assert not rejected
    assert (stats(fleet).num_waiting, stats(fleet).num_preempted) == (1, 1), "it waits to be resumed"
    assert call(fleet, "pause", "all").error is None, "the one that is up answers"
    assert owners(fleet, "r0") == [0]
    may_start.set()
    wait_for(lambda: fleet.num_restarts == 1)
    assert call(fleet, "is_paused").value == 2
    fleet.send(Call(3, "resume"))
    hear_rest(fleet, [first], heard)
    assert len(heard["r0", 0]) > 0
    fleet.shutdown()


def test_counters_do_not_fall_while_a_member_is_away(gated: Gated) -> None:
    gated.open()
    for name in "abcd":
        gated.fleet.send(add(name))
    tokens_until_finished(gated.fleet, *"abcd")
    before = stats(gated.fleet)
    gated[0].kill()
    wait_for(lambda: gated.fleet.num_restarts == 1)
    gated.open()
    after = stats(gated.fleet)
    assert after.generation_tokens_total == before.generation_tokens_total == 24
    assert (after.finished_requests_total, after.num_blocks) == (4, before.num_blocks)


def test_a_death_ends_all_engines_that_share_experts(options: EngineOptions) -> None:
    """All start again over other memory, and go on with the tokens that they would have had; no request is blamed."""
    common = CommonMemory(2)
    gated, heard = Gated(options, common=common), Heard()
    fleet = gated.fleet
    try:
        asked = [request(number, max_tokens=50) for number in range(2)]
        fleet.send(*map(AddRequest, asked))
        gated.step(0, heard, 2)
        gated.step(1, heard, 2)
        fleet.send(Call(7, "stop_replica", "0"))
        outputs = fleet.receive(PATIENCE)
        assert outputs is not None
        [result] = outputs.results
        assert result.error == "replica 0 cannot be stopped: the others need its experts"
        before = [gated[0], gated[1]]
        gated[0].kill()
        wait_for(lambda: before[1].was_shut_down)
        before[1].let(1)
        wait_for(lambda: fleet.num_restarts == 2)
        assert common.generation == 2
        assert all(each.was_shut_down for each in before)
        assert not any(member.search.is_searching for member in fleet.members)
        gated.open()
        hear_rest(fleet, asked, heard)
        for name in ("r0", "r1"):
            assert sum(len(update.new_token_ids) for update in heard[name, 0]) == 50
    finally:
        gated.open()
        fleet.shutdown()


def test_an_abort_while_the_engine_of_the_request_starts(gated: Gated) -> None:
    gated.fleet.send(add("a", max_tokens=50), add("b", max_tokens=50), add("c", max_tokens=50))
    heard: Heard = {}
    gated.step(0, heard, 2)
    gated[0].kill()
    wait_for(lambda: gated.fleet.num_restarts == 1)
    gated.fleet.send(Abort("a"))
    num_heard = len(heard["a", 0])
    gated.open()
    while not all(heard[name, 0][-1].finish_reason for name in "bc" if (name, 0) in heard) or ("b", 0) not in heard:
        outputs = gated.fleet.receive(PATIENCE)
        assert outputs is not None
        note(outputs.updates, heard)
    assert len(heard["a", 0]) == num_heard
    for name in "bc":
        assert sum(len(update.new_token_ids) for update in heard[name, 0]) == 50
    assert stats(gated.fleet).num_used_blocks == 0


@pytest.mark.parametrize(("num_failures", "pause"), [(3, 0.001), (5, 0.001), (3, 1000.0)])
def test_the_requests_of_a_member_that_does_not_start_again_go_on_at_the_other(
    small: EngineOptions,
    undisturbed: dict[tuple[str, int], object],
    monkeypatch: pytest.MonkeyPatch,
    num_failures: int,
    pause: float,
) -> None:
    """It is tried again, each time behind the pause."""
    monkeypatch.setattr("quire.engine.fleet.PAUSE_SECONDS", 0.001)
    monkeypatch.setattr("quire.engine.fleet.RETRY_SECONDS", pause)
    num_starts = 0

    def start(_ready: EngineReady | None, _stats: EngineStats | None) -> MortalClient:
        nonlocal num_starts
        num_starts += 1
        if 1 < num_starts <= 1 + num_failures:
            raise ModelLoadError("no memory")
        is_first = num_starts == 1
        return MortalClient(small, FAKE, lambda request_ids: is_first and len(request_ids) > 4, loses=False)

    def start_other(_ready: EngineReady | None, _stats: EngineStats | None) -> MortalClient:
        return MortalClient(small, FAKE, never, loses=False)

    fleet = started(Fleet([start_other, start], router="round-robin"))
    heard, rejected = hear(fleet, [request(number, **KINDS[number % len(KINDS)]) for number in range(12)])
    assert not rejected
    assert told(heard) == undisturbed
    if pause < 1:
        wait_for(lambda: fleet.num_restarts == 1 and not fleet.members[1].is_lost)
    else:
        wait_for(lambda: fleet.members[1].is_lost)
        assert (fleet.num_restarts, num_starts) == (0, 4)
        assert call(fleet, "sleep", "1").value == 1, "a lost member is not waited for"
    fleet.shutdown()


def test_without_any_member_everything_fails(small: EngineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.fleet.PAUSE_SECONDS", 0.001)
    num_starts = 0

    def start(_ready: EngineReady | None, _stats: EngineStats | None) -> MortalClient:
        nonlocal num_starts
        num_starts += 1
        if num_starts > 2:
            raise ModelLoadError("the checkpoint is gone")
        return MortalClient(small, FAKE, lambda request_ids: bool(request_ids), loses=False)

    fleet = started(Fleet([start, start], router="round-robin"))
    for number in range(4):
        fleet.send(AddRequest(request(number)))
    with pytest.raises(EngineDeadError, match="could not be started again: the checkpoint is gone: killed by the test"):
        receive_until(fleet, lambda received: False)
    with pytest.raises(EngineDeadError, match="the checkpoint is gone"):
        fleet.receive(0)
    with pytest.raises(EngineDeadError, match="the checkpoint is gone"):
        fleet.send(add("e"))
    fleet.shutdown()


def test_without_restarts_the_end_of_one_is_the_end_of_all(make: Make) -> None:
    fleet = make("plain", "failing_step", restarts=False)
    for name in "abcd":
        fleet.send(add(name, max_tokens=30))
    with pytest.raises(EngineDeadError, match="the engine core failed"):
        receive_until(fleet, lambda received: False)
    with pytest.raises(EngineDeadError, match="the engine core failed"):
        fleet.send(add("e"))


def test_a_start_that_fails_is_told(options: EngineOptions) -> None:
    wrong = msgspec.structs.replace(options, block_size=24)

    def starter(each: EngineOptions) -> Callable[..., ProcessClient]:
        return lambda _ready, _stats: ProcessClient(each, executor=FAKE)

    for starts in ([wrong, options], [options, wrong]):
        fleet = Fleet([starter(each) for each in starts])
        try:
            with pytest.raises(ConfigError, match="block_size"):
                receive_until(fleet, lambda received: False)
            with pytest.raises(ConfigError, match="block_size"):
                _ = fleet.ready
        finally:
            fleet.shutdown()


def test_shutdown_wakes_a_thread_that_receives(make: Make) -> None:
    fleet = make("plain", "plain")
    failures: list[Exception] = []

    def wait() -> None:
        try:
            fleet.receive(PATIENCE)
        except EngineDeadError as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    fleet.shutdown()
    thread.join(PATIENCE)
    assert [str(error) for error in failures] == ["the engine was shut down"]
    with pytest.raises(EngineDeadError):
        fleet.send(add("a"))


def test_nothing_to_tell(make: Make) -> None:
    fleet = make("plain", "plain")
    assert fleet.receive(0) is None
    assert fleet.silence == 0


def test_the_silence_of_one_is_not_that_of_all(gated: Gated) -> None:
    gated[0].silence = 30.0
    assert gated.fleet.silence == 0
    for name in "abc":
        gated.fleet.send(add(name))
    assert owners(gated.fleet, *"abc") == [1, 1, 1], "no request is given to an engine that does not answer"
    gated[1].silence = 20.0
    assert gated.fleet.silence == 20
    gated[0].silence = gated[1].silence = 0.0


def test_an_unknown_router(options: EngineOptions) -> None:
    with pytest.raises(UserError, match="did you mean 'round-robin'"):
        Fleet([lambda _ready, _stats: InProcessClient(options, executor=FAKE)], router="round-robbin")


def test_snapshots_add_up() -> None:
    one = EngineStats(block_size=16, block_bytes=100, num_blocks=5, steps_total=7)
    away = EngineStats(steps_total=3)
    total = EngineStats(block_size=16, block_bytes=100, num_blocks=10, steps_total=17)
    assert add_up([one, one, away]) == add_up([away, one, one]) == total
    some, more = EngineStats(accepted_drafts_by_position=[3]), EngineStats(accepted_drafts_by_position=[2, 1])
    for found in (add_up([some, more]), add_up([more, one, some]), carry_over(some, more), carry_over(more, some)):
        assert found.accepted_drafts_by_position == [5, 1]
