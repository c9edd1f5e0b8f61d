"""A server with two replicas: what its clients see when one of them is away, comes back, or never does."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import psutil
import pytest

from quire.engine.fleet import Fleet
from quire.engine.member import Entry
from quire.engine.process_client import ProcessClient
from tests.fakes.fates import Fates
from tests.long import all_but_long
from tests.processes import has_ended
from tests.server.conftest import Served, serving_apart
from tests.server.serve_process import Process
from tests.server.sse import events
from tests.server.test_restart import BODIES, GUARD_SECONDS, ask

FEW = BODIES[8:]


@pytest.fixture
def fates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fates:
    return Fates(tmp_path, monkeypatch)


@pytest.fixture
async def apart(model_path: Path, fates: Fates) -> AsyncIterator[Served]:
    """The application over two engines in processes of their own."""
    async with serving_apart(model_path, max_num_seqs=40, data_parallel_size=2, executor="fated_slow") as served:
        _ = await asyncio.to_thread(lambda: served.engine.ready)
        yield served


def fleet_of(served: Served) -> Fleet:
    assert isinstance(served.engine._session.client, Fleet)
    return served.engine._session.client


def entries_of(fleet: Fleet, number: int) -> list[Entry]:
    return [entry for entry in fleet._entries.values() if entry.member is fleet.members[number]]


def kill(served: Served, number: int) -> None:
    client = fleet_of(served).members[number].client
    assert isinstance(client, ProcessClient)
    os.kill(client.pid, signal.SIGKILL)


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.005)


async def test_one_replica_is_away(apart: Served, fates: Fates) -> None:
    fleet = fleet_of(apart)
    async with asyncio.timeout(GUARD_SECONDS):
        undisturbed = await asyncio.gather(*(ask(apart, fields) for fields in FEW))
        num_before = apart.context.metrics.stats.generation_tokens_total
        fates.close_gate()
        running = [asyncio.ensure_future(ask(apart, fields)) for fields in FEW]
        await until(lambda: any(entry.position for entry in entries_of(fleet, 1)))
        kill(apart, 1)
        await until(lambda: fleet.members[1].death is not None)
        for path in ("/health", "/ready"):
            assert (await apart.client.get(path)).status_code == 200, "the other one takes requests"
        assert fleet.members[1].entries
        leaves = next(index for index, task in enumerate(running) if not task.done())
        running[leaves].cancel()
        assert await asyncio.gather(*(ask(apart, FEW[number]) for number in (0, 3))) == [undisturbed[0], undisturbed[3]]
        fates.open_gate()
        answers = await asyncio.gather(*running, return_exceptions=True)
        for number, (answer, expected) in enumerate(zip(answers, undisturbed, strict=True)):
            assert number == leaves or answer == expected
        metrics = (await apart.client.get("/metrics")).text
        assert [line for line in metrics.splitlines() if "engine_restarts_total 1" in line]
        assert apart.context.metrics.stats.generation_tokens_total > num_before, "counters go on"
        await apart.until_idle()


async def test_a_replica_is_taken_out_of_service(apart: Served) -> None:
    """Its requests go on at the other one with the tokens that they would have had."""
    fleet, post = fleet_of(apart), apart.client.post
    async with asyncio.timeout(GUARD_SECONDS):
        undisturbed = await asyncio.gather(*(ask(apart, fields) for fields in FEW))
        running = [asyncio.ensure_future(ask(apart, fields)) for fields in FEW]
        await until(lambda: any(entry.position for entry in entries_of(fleet, 1)))
        assert (await post("/stop_replica?replica=1")).json() == {"replica": 1, "is_up": False}
        assert not entries_of(fleet, 1)
        assert await asyncio.gather(*running) == undisturbed
        assert (await apart.client.get("/ready")).status_code == 200
        for number, problem in (("0", "cannot be stopped"), ("2", "there is no replica 2"), ("one", "whole number")):
            response = await post(f"/stop_replica?replica={number}")
            assert (response.status_code, response.json()["error"]["param"]) == (400, "replica")
            assert problem in response.text
        assert (await post("/start_replica?replica=1")).json() == {"replica": 1, "is_up": True}
        assert await asyncio.gather(*(ask(apart, fields) for fields in FEW)) == undisturbed
        assert entries_of(fleet, 0) == entries_of(fleet, 1) == []


@pytest.mark.long
async def test_all_replicas_are_away(apart: Served, fates: Fates) -> None:
    fleet = fleet_of(apart)
    async with asyncio.timeout(GUARD_SECONDS):
        undisturbed = await ask(apart, BODIES[12])
        fates.close_gate()
        for number in range(2):
            kill(apart, number)
        await until(lambda: apart.engine.is_restarting)
        assert (await apart.client.get("/ready")).status_code == 503
        assert (await apart.client.get("/health")).status_code == 200
        asking = asyncio.ensure_future(ask(apart, BODIES[12]))
        await until(lambda: len(fleet._entries) > 0)
        fates.open_gate()
        assert await asking == undisturbed


@pytest.mark.parametrize("api_server_count", all_but_long([1, 2], [1]))
async def test_sigterm_lets_the_requests_of_both_replicas_end(
    model_path: Path, processes: list[Process], api_server_count: int
) -> None:
    process = Process(
        model_path, "very_slow", data_parallel_size=2, api_server_count=api_server_count, shutdown_timeout=1000
    ).wait_ready()
    processes.append(process)
    children = psutil.Process(process.popen.pid).children()
    body = {"prompt": "abc", "max_tokens": 20, "stream": True}
    async with (
        asyncio.timeout(GUARD_SECONDS),
        httpx.AsyncClient(base_url=process.url, timeout=GUARD_SECONDS) as client,
    ):
        answers = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(4)]
        while (await client.get("/load")).json()["server_load"] < 4:
            await asyncio.sleep(0.02)
        process.signal(signal.SIGTERM)
        for answer in await asyncio.gather(*answers):
            *_, last, done = events(answer.text)
            assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
    status, error = await asyncio.to_thread(process.finish)
    assert status == 0, error
    assert all(has_ended(child) for child in children)
