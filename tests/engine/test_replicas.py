"""Several engines as one: requests are spread, answers add up, and the end of one is not the end of all."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest

from quire.config.options import EngineOptions
from quire.engine.client import EngineClient
from quire.engine.inprocess_client import InProcessClient
from quire.engine.messages import Abort, AddRequest, Call, EngineOutputs
from quire.engine.process_client import ProcessClient
from quire.engine.replicas import PREFIX_TOKENS, ReplicatedClient
from quire.errors import ConfigError, EngineDeadError, UserError
from quire.stats import EngineStats, add_up
from tests.engine.driving import add, call, stats, tokens_until_finished

PATIENCE = 60.0
Make = Callable[..., ReplicatedClient]


@pytest.fixture
def make(options: EngineOptions) -> Iterator[Make]:
    made: list[ReplicatedClient] = []

    def replicas(*executors: str, router: str = "round-robin") -> ReplicatedClient:
        clients = [InProcessClient(options, executor=f"tests.fakes.factories:{each}") for each in executors]
        made.append(ReplicatedClient(clients, router))
        return made[-1]

    yield replicas
    for client in made:
        client.shutdown()


def owners(client: ReplicatedClient, *request_ids: str) -> list[int]:
    return [client._requests[request_id].replica for request_id in request_ids]


def receive_until(client: EngineClient, is_enough: Callable[[Sequence[EngineOutputs]], bool]) -> list[EngineOutputs]:
    received: list[EngineOutputs] = []
    while not is_enough(received):
        outputs = client.receive(PATIENCE)
        assert outputs is not None
        received.append(outputs)
    return received


def rejected(outputs: Sequence[EngineOutputs]) -> list[str]:
    return [each.request_id for output in outputs for each in output.rejections]


def test_requests_are_spread_and_finish_as_on_one_engine(make: Make, options: EngineOptions) -> None:
    alone = InProcessClient(options, executor="tests.fakes.factories:plain")
    names = [f"r{number}" for number in range(7)]
    for number, name in enumerate(names):
        alone.send(add(name, num_prompt_tokens=5 + number))
    expected = tokens_until_finished(alone, *names)
    client = make("plain", "plain", "plain")
    for number, name in enumerate(names):
        client.send(add(name, num_prompt_tokens=5 + number))
    assert tokens_until_finished(client, *names) == expected
    assert client._requests == {}
    total = stats(client)
    assert total.finished_requests_total == 7
    assert total.num_blocks == 3 * stats(alone).num_blocks
    assert total.block_size == stats(alone).block_size
    assert client.ready.num_blocks == 3 * alone.ready.num_blocks
    assert client.ready.backend.endswith("3 replicas")


def test_requests_that_begin_alike_share_a_replica(make: Make) -> None:
    client = make("slow", "slow", "slow", router="prefix-aware")
    for name in "abc":
        client.send(add(name, num_prompt_tokens=PREFIX_TOKENS + 10, max_tokens=1000))
    for name in "xy":
        client.send(add(name, num_prompt_tokens=PREFIX_TOKENS - 1, max_tokens=1000))
    alike, others = owners(client, *"abc"), owners(client, *"xy")
    assert len(set(alike)) == 1
    assert len({*alike, *others}) == 3, "short requests go to the least loaded"


def test_abort_reaches_the_request_and_frees_its_place(make: Make) -> None:
    client = make("slow", "slow", router="least-loaded")
    for name in "abcd":
        client.send(add(name, max_tokens=100_000))
    assert owners(client, *"abcd") == [0, 1, 0, 1]
    for name in "bd":
        client.send(Abort(name))
    client.send(Abort("never heard of"))
    client.send(add("e", max_tokens=2))
    assert owners(client, "e") == [1]
    receive_until(client, lambda _: "e" not in client._requests)
    client.send(Abort("a"))
    client.send(Abort("c"))
    assert call(client, "check").error is None
    assert stats(client).num_used_blocks == 0


def test_a_request_of_several_sequences_ends_with_the_last(make: Make) -> None:
    client = make("plain", "plain")
    message = add("a")
    params = msgspec.structs.replace(message.request.params, n=3, temperature=1.0)
    client.send(AddRequest(msgspec.structs.replace(message.request, params=params)))
    ends = 0
    while ends < 3:
        assert list(client._requests) == ["a"]
        outputs = client.receive(PATIENCE)
        assert outputs is not None
        ends += sum(update.finish_reason is not None for update in outputs.updates)
    assert client._requests == {}


def test_calls_are_answered_by_all(make: Make) -> None:
    client = make("plain", "plain")
    for name in "abcd":
        client.send(add(name, num_prompt_tokens=40))
    tokens_until_finished(client, *"abcd")
    cached = stats(client).num_cached_blocks
    assert cached > 0
    assert call(client, "reset_prefix_cache").value == cached
    client.send(Call(7, "sleep", "1"))
    receive_until(client, lambda received: any(output.results for output in received))
    assert call(client, "is_sleeping").value == 1
    assert call(client, "wake_up").error is None
    assert call(client, "is_sleeping").value == 0
    assert call(client, "kv_snapshot").error == "'kv_snapshot' is of one engine, and this one has 2 replicas"


def test_a_registered_prefix_is_of_one_replica(make: Make) -> None:
    client = make("plain", "plain")
    message = add("p", num_prompt_tokens=40, max_tokens=1)
    client.send(AddRequest(msgspec.structs.replace(message.request, register_prefix=True)))
    tokens_until_finished(client, "p")
    assert stats(client).num_registered_blocks > 0
    for error in (None, "no prefix 'p' is registered"):
        client.send(Call(7, "unregister_prefix", "p"))
        (result,) = receive_until(client, lambda received: any(output.results for output in received))[-1].results
        assert result.error == error
    assert stats(client).num_registered_blocks == 0


def test_the_end_of_a_replica_fails_its_requests_and_no_others(make: Make) -> None:
    client = make("plain", "failing_step")
    for name in "abcd":
        client.send(add(name, max_tokens=30))
    received = receive_until(
        client,
        lambda received: (
            len(rejected(received)) == 2
            and sum(update.finish_reason is not None for output in received for update in output.updates) == 2
        ),
    )
    failures = [each for output in received for each in output.rejections]
    assert [each.request_id for each in failures] == ["b", "d"]
    for failure in failures:
        error = failure.error()
        assert isinstance(error, EngineDeadError)
        assert "replica 1 has ended: the engine core failed" in str(error)
        assert error.summary == "a replica of the engine has ended"
    client.send(add("e"))
    client.send(add("f"))
    assert owners(client, "e", "f") == [0, 0]
    tokens_until_finished(client, "e", "f")
    assert stats(client).finished_requests_total == 4


def test_without_any_replica_everything_fails(make: Make) -> None:
    client = make("failing_step", "failing_step")
    for name in "abcd":
        client.send(add(name, max_tokens=30))
    with pytest.raises(EngineDeadError, match="the engine core failed"):
        receive_until(client, lambda received: False)
    with pytest.raises(EngineDeadError):
        client.receive(0)
    with pytest.raises(EngineDeadError):
        client.send(add("e"))


def test_a_killed_process_is_one_replica(options: EngineOptions) -> None:
    processes = [ProcessClient(options, executor="tests.fakes.factories:slow") for _ in range(2)]
    client = ReplicatedClient(processes, "round-robin")
    try:
        assert client.ready.num_blocks == 2 * 256
        client.send(add("a", max_tokens=4_000))
        client.send(add("b", max_tokens=10))
        os.kill(processes[0].pid, signal.SIGKILL)
        received = receive_until(client, lambda received: rejected(received) == ["a"])
        assert "SIGKILL" in received[-1].rejections[0].message
        receive_until(client, lambda _: "b" not in client._requests)
    finally:
        client.shutdown()


def test_a_start_that_fails_is_told(options: EngineOptions) -> None:
    wrong = msgspec.structs.replace(options, block_size=24)
    client = ReplicatedClient(
        [ProcessClient(each, executor="tests.fakes.factories:plain") for each in (wrong, options)]
    )
    try:
        with pytest.raises(ConfigError, match="block_size"):
            receive_until(client, lambda received: False)
    finally:
        client.shutdown()


def test_shutdown_wakes_a_thread_that_receives(make: Make) -> None:
    client = make("plain", "plain")
    failures: list[Exception] = []

    def wait() -> None:
        try:
            client.receive(PATIENCE)
        except EngineDeadError as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    client.shutdown()
    thread.join(PATIENCE)
    assert [str(error) for error in failures] == ["the engine was shut down"]
    with pytest.raises(EngineDeadError):
        client.send(add("a"))


def test_nothing_to_tell(make: Make) -> None:
    client = make("plain")
    assert client.receive(0) is None
    assert client.silence == 0


def test_an_unknown_router(options: EngineOptions) -> None:
    with pytest.raises(UserError, match="did you mean 'round-robin'"):
        ReplicatedClient([InProcessClient(options, executor="tests.fakes.factories:plain")], "round-robbin")


def test_snapshots_add_up() -> None:
    one = EngineStats(block_size=16, block_bytes=100, num_blocks=5, steps_total=7)
    assert add_up([one, one]) == EngineStats(block_size=16, block_bytes=100, num_blocks=10, steps_total=14)
