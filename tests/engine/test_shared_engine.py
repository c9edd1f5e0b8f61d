"""One engine for several sessions: each gets what it asked for, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from quire.clock import VirtualClock
from quire.config.options import EngineOptions
from quire.engine import long_prompts
from quire.engine.async_engine import AsyncLLM
from quire.engine.fleet import Fleet
from quire.engine.inprocess_client import InProcessClient
from quire.engine.messages import Abort, Call, CallResult, EngineOutputs
from quire.engine.shared_client import SharedClient
from quire.engine.shared_engine import SharedEngine
from quire.engine.shared_state import SharedState
from quire.errors import EngineDeadError, InternalError, UserError
from quire.kv_cache.stats import EngineStats
from quire.multimodal.named import NamedPictures
from quire.request import FinishReason
from quire.sampling_params import SamplingParams
from quire.server.shared_pictures import PICTURES, ParentsNames, PictureService
from quire.server.shared_responses import ParentsResponses
from quire.utils.heartbeat import Heartbeat
from quire.utils.runtime_directory import RuntimeDirectory
from quire.utils.shared_numbers import Numbers
from tests.engine.driving import add, stats, tokens_until_finished

FAKES = "tests.fakes.factories:"
T = TypeVar("T")


def echo(session: int, payload: bytes) -> bytes:
    return payload


def fail(session: int, payload: bytes) -> bytes:
    raise ValueError("injected")


class Shared:
    """An engine and its sessions, all in this process."""

    def __init__(self, options: EngineOptions, directory: RuntimeDirectory, executor: str = "slow") -> None:
        self.directory = directory
        self.numbers = Numbers.create(directory.path / "numbers", 2)
        self.state = SharedState(self.numbers)
        self.seen: list[EngineStats] = []
        self.engine = SharedEngine(
            Fleet([lambda _ready, _stats: InProcessClient(options, executor=FAKES + executor)], restarts=False),
            directory,
            self.state.engine,
            services={"echo": echo, "broken": fail, PICTURES: PictureService(NamedPictures(2**16)).answer},
            on_stats=self.seen.append,
            on_change=lambda: None,
        )
        self.engine.start()
        self.clients: list[SharedClient] = []

    def open(self) -> SharedClient:
        session = self.engine.open_session()
        self.clients.append(SharedClient(self.directory.path, session, self.state))
        return self.clients[-1]


@pytest.fixture
def directory() -> Iterator[RuntimeDirectory]:
    """Not below tmp_path, which may be too long for sockets."""
    with tempfile.TemporaryDirectory() as parent:
        directory = RuntimeDirectory.create(Path(parent))
        yield directory
        directory.remove()


@pytest.fixture
def shared(options: EngineOptions, directory: RuntimeDirectory) -> Iterator[Shared]:
    shared = Shared(options, directory)
    yield shared
    for client in shared.clients:
        client.shutdown()
    shared.engine.shutdown()


def test_each_session_gets_its_own_outputs(
    options: EngineOptions, shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_prompts, "PIECE_TOKENS", 4)
    first, second = shared.open(), shared.open()
    assert first.ready == second.ready
    keys = {client: [f"{number}#{client.session}.1" for number in range(4)] for client in (first, second)}
    for number in range(4):
        for client in (first, second):
            client.send(add(f"{client.session}-{keys[client][number]}", num_prompt_tokens=3 * client.session + number))
    alone = InProcessClient(options, executor=FAKES + "plain")
    for client in (first, second):
        names = [f"{client.session}-{key}" for key in keys[client]]
        for number, (name, tokens) in enumerate(tokens_until_finished(client, *names).items()):
            alone.send(add(name, num_prompt_tokens=3 * client.session + number))
            assert tokens_until_finished(alone, name) == {name: tokens}
    alone.shutdown()
    assert shared.seen[-1].finished_requests_total == 8


def test_calls_are_answered_where_they_were_made(shared: Shared) -> None:
    """With the same ids on both sides."""
    first, second = shared.open(), shared.open()
    for client, method in ((first, "is_sleeping"), (second, "num_blocks")):
        client.send(Call(1, method))
    results = [call_result(client) for client in (first, second)]
    assert [result.error for result in results] == [None, "unknown method 'num_blocks'"]


def test_a_request_id_belongs_to_one_session_until_its_request_ends(shared: Shared) -> None:
    first, second = shared.open(), shared.open()
    first.send(add("same#1.1", max_tokens=2000))
    wait_for(first, lambda outputs: outputs.updates)
    second.send(add("same#2.1"))
    [rejected] = wait_for(second, lambda outputs: outputs.rejections)
    error = rejected.error()
    assert isinstance(error, UserError)
    assert (error.message, error.param) == ("request id 'same' is already in use", "request_id")
    first.send(Abort("same#1.1"))
    assert stats(first).num_running == 0
    second.send(add("same#2.2"))
    assert len(tokens_until_finished(second, "same#2.2")["same#2.2"]) == 6


def test_a_session_that_ends_leaves_no_request_and_the_engines_true_state(shared: Shared) -> None:
    first, second = shared.open(), shared.open()
    for number in range(3):
        first.send(add(f"{number}#1.{number}", max_tokens=2000))
    second.send(add("other#2.1", max_tokens=20))
    wait_for(second, lambda outputs: outputs.updates)
    first.send(Call(5, "pause", "new"))
    call_result(first)
    shared.state.engine.is_asleep = True  # as a process leaves it that dies before its call to sleep
    shared.engine.close_session(first.session)
    wait_for(second, lambda outputs: [each for each in outputs.updates if each.finish_reason == FinishReason.LENGTH])
    assert stats(second).num_running == stats(second).num_waiting == 0
    state = shared.state.engine
    assert (state.is_asleep, state.pauses, state.refuses_new) == (False, True, True)
    first.send(add("late#1.9"))  # what was still on its way
    assert stats(second).num_waiting == 0
    assert shared.open().session not in (first.session, second.session), "no number is given twice"


def test_sessions_without_requests_hear_of_the_engine(shared: Shared) -> None:
    busy, idle = shared.open(), shared.open()
    assert idle.ready.num_blocks == 256
    busy.send(add("a#1.1", max_tokens=2000))
    wait_for(idle, lambda outputs: outputs.stats is not None and outputs.stats.num_running == 1)
    assert shared.state.engine.num_running == 1


def test_requests_without_a_seed_get_another_one_in_each_session(options: EngineOptions, shared: Shared) -> None:
    options = msgspec.structs.replace(options, skip_tokenizer_init=True, seed=11)
    engines = [AsyncLLM.of_session(options, shared.open()) for _ in range(2)]
    requests = [engine.input_processor.process("r", [1, 2], SamplingParams()) for engine in engines]
    assert requests[0].seed != requests[1].seed
    for engine in engines:
        engine.shutdown()


async def test_services_of_the_parent(shared: Shared) -> None:
    client = shared.open()
    with ThreadPoolExecutor() as threads:
        receiving = threads.submit(wait_for_death, client)
        assert await client.questions.ask("echo", b"\0abc") == b"\0abc"
        assert await client.questions.ask("broken", b"x") is None
        with pytest.raises(InternalError, match="the parent process failed to answer"):
            await ParentsResponses(client).find_response("owner", "r")
        asked = [asyncio.ensure_future(client.questions.ask("echo", bytes([number]))) for number in range(20)]
        assert await asyncio.gather(*asked) == [bytes([number]) for number in range(20)]
        shared.engine.shutdown()
        assert "was shut down" in str(await asyncio.wrap_future(receiving))
    with pytest.raises(EngineDeadError):
        await client.questions.ask("echo", b"")


async def test_sessions_name_pictures_for_one_another(shared: Shared) -> None:
    clients = [shared.open() for _ in range(2)]
    first, second = (ParentsNames(client) for client in clients)
    with ThreadPoolExecutor() as threads:
        for client in clients:
            threads.submit(wait_for_death, client)
        for _ in range(2):
            await first.put(b"n", bytes(2**15))
        assert await second.picture_of(b"n") == bytes(2**15)
        assert await second.picture_of(b"m") is None
        await second.put(b"n", b"other")
        assert await first.picture_of(b"n") == b"other"
        await first.clear()
        assert await second.picture_of(b"n") is None
        shared.engine.shutdown()


async def test_a_session_asks_another_one(shared: Shared) -> None:
    """Questions are answered as their answers come; of a session that fails, has ended or ends the answer is None."""
    asker, asked = shared.open(), shared.open()
    release = asyncio.Event()

    async def answer(payload: bytes) -> bytes:
        if payload == b"later":
            await release.wait()
        if payload == b"fail":
            raise ValueError("injected")
        return payload + b"!"

    with ThreadPoolExecutor() as threads:
        receiving = [threads.submit(wait_for_death, client) for client in (asker, asked)]
        asked.questions.answer_with(answer)
        later = asyncio.ensure_future(asker.questions.ask(asked.session, b"later"))
        assert await asker.questions.ask(asked.session, b"now") == b"now!"
        assert await asker.questions.ask(asked.session, b"fail") is None
        assert await asker.questions.ask(99, b"absent") is None
        assert not later.done()
        release.set()
        assert await later == b"later!"
        release.clear()
        later = asyncio.ensure_future(asker.questions.ask(asked.session, b"later"))
        assert await asker.questions.ask(asked.session, b"now") == b"now!"
        shared.engine.close_session(asked.session)
        assert await later is None
        shared.engine.shutdown()
        assert "was shut down" in str(await asyncio.wrap_future(receiving[0]))
        asked.shutdown()
        await asyncio.wrap_future(receiving[1])
        release.set()


def test_all_sessions_hear_of_the_engines_death(options: EngineOptions, directory: RuntimeDirectory) -> None:
    """With one error id, by which the log is searched."""
    shared = Shared(options, directory, "failing_step")
    clients = [shared.open(), shared.open()]
    clients[0].send(add("a#1.1"))
    errors = []
    for client in clients:
        errors.append(wait_for_death(client))
        with pytest.raises(EngineDeadError):
            client.send(Abort("a#1.1"))
        client.shutdown()
    failure = shared.engine.failure
    assert isinstance(failure, EngineDeadError)
    assert [error.error_id for error in errors] == [failure.error_id] * 2
    assert "injected" in str(errors[0])
    shared.engine.shutdown()


def test_a_parent_that_stops_is_silence(shared: Shared) -> None:
    client = shared.open()
    _ = client.ready
    clock = VirtualClock()
    client._heartbeat = Heartbeat(clock)
    for _ in range(10):
        clock.advance(0.5)
        shared.engine.tell()
        assert client.silence == 0
    for _ in range(10):
        clock.advance(0.5)
        _ = client.silence
    assert client.silence == 5
    shared.engine.tell()
    assert client.silence == 0


def wait_for(client: SharedClient, take: Callable[[EngineOutputs], T]) -> T:
    """The first outputs of which `take` finds something."""
    while True:
        outputs = client.receive(30)
        assert outputs is not None
        if found := take(outputs):
            return found


def call_result(client: SharedClient) -> CallResult:
    [result] = wait_for(client, lambda outputs: outputs.results)
    return result


def wait_for_death(client: SharedClient) -> EngineDeadError:
    try:
        while True:
            client.receive()
    except EngineDeadError as error:
        return error
