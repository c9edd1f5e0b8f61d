"""The inline client: one step a call, waiting when idle, errors that say why."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from quire.config.options import EngineOptions
from quire.engine.inprocess_client import InProcessClient
from quire.engine.messages import Abort
from quire.errors import ConfigError, EngineDeadError, ModelLoadError
from tests.engine.driving import add, call, first_update, stats, tokens_until_finished


@pytest.fixture
def client(options: EngineOptions) -> InProcessClient:
    return InProcessClient(options, executor="tests.fakes.factories:plain")


def test_generates_and_frees(client: InProcessClient) -> None:
    client.send(add("a"))
    client.send(add("b", num_prompt_tokens=40, max_tokens=9))
    tokens = tokens_until_finished(client, "a", "b")
    assert len(tokens["a"]) == 6
    assert len(tokens["b"]) == 9
    assert stats(client).num_used_blocks == 0
    assert call(client, "check").error is None


def test_tokens_do_not_depend_on_queue_depth(options: EngineOptions) -> None:
    tokens = []
    for queue_depth in (1, 2):
        client = InProcessClient(
            msgspec.structs.replace(options, queue_depth=queue_depth), executor="tests.fakes.factories:plain"
        )
        client.send(add("a", num_prompt_tokens=33, max_tokens=40))
        tokens.append(tokens_until_finished(client, "a"))
    assert tokens[0] == tokens[1]


def test_two_engines_of_different_block_size_in_one_process(options: EngineOptions) -> None:
    clients = [
        InProcessClient(msgspec.structs.replace(options, block_size=size), executor="tests.fakes.factories:plain")
        for size in (8, 32)
    ]
    assert [client.ready.block_size for client in clients] == [8, 32]
    for client in clients:
        client.send(add("a", num_prompt_tokens=50, max_tokens=20))
    for _ in range(5):
        for client in clients:
            client.receive()
    assert [stats(client).num_used_blocks for client in clients] == [7, 2]
    rest = [tokens_until_finished(client, "a") for client in clients]
    assert rest[0] == rest[1]


def test_abort_frees_the_blocks_and_says_so(client: InProcessClient) -> None:
    client.send(add("a", max_tokens=500))
    first_update(client)
    client.send(Abort("a"))
    outputs = client.receive(30)
    assert outputs is not None
    assert outputs.stats is not None
    assert outputs.stats.num_running == 0
    assert outputs.stats.num_used_blocks == 0


def test_idle_receive_returns_none_after_its_timeout(client: InProcessClient) -> None:
    assert client.receive(0.01) is None


def test_a_message_wakes_an_idle_receive(client: InProcessClient) -> None:
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(tokens_until_finished, client, "a")
        client.send(add("a"))
        assert len(received.result(30)["a"]) == 6


def test_shutdown_wakes_an_idle_receive_and_is_idempotent(client: InProcessClient) -> None:
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(client.receive)
        client.shutdown()
        client.shutdown()
        with pytest.raises(EngineDeadError, match="the engine was shut down"):
            received.result(30)
    with pytest.raises(EngineDeadError, match="shut down"):
        client.send(add("a"))


def test_a_failing_step_names_the_cause_now_and_later(options: EngineOptions) -> None:
    client = InProcessClient(options, executor="tests.fakes.factories:failing_step")
    client.send(add("a"))
    with pytest.raises(EngineDeadError, match="RuntimeError: injected failure at step 3") as caught:
        tokens_until_finished(client, "a")
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(EngineDeadError, match="injected failure"):
        client.receive()
    with pytest.raises(EngineDeadError, match="injected failure"):
        client.send(add("b"))


def test_start_errors_come_as_they_are(tmp_path: Path, options: EngineOptions) -> None:
    with pytest.raises(ModelLoadError, match="no config"):
        InProcessClient(EngineOptions(model=str(tmp_path)), executor="tests.fakes.factories:plain")
    with pytest.raises(ConfigError, match="block_size"):
        InProcessClient(msgspec.structs.replace(options, block_size=12), executor="tests.fakes.factories:plain")
