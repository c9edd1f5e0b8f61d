"""Two replicas of a real model: one of them is killed or stopped, and no token differs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from quire import LLM, AsyncLLM
from quire.config.options import EngineOptions
from quire.engine.fleet import Fleet
from quire.engine.process_client import ProcessClient
from quire.errors import ConfigError
from tests.e2e.test_restart import GUARD_SECONDS, KINDS, OPTIONS, ask_all, text_request, think
from tests.processes import has_ended

NUM_REQUESTS = len(KINDS) + 4


@pytest.fixture
async def engine() -> AsyncIterator[AsyncLLM]:
    engine = AsyncLLM.from_options(EngineOptions.from_keywords({**OPTIONS, "data_parallel_size": 2}))
    try:
        async with asyncio.timeout(GUARD_SECONDS):
            await think(engine)
            yield engine
    finally:
        engine.shutdown()


def fleet_of(engine: AsyncLLM) -> Fleet:
    assert isinstance(engine._session.client, Fleet)
    return engine._session.client


def pids(engine: AsyncLLM) -> list[int]:
    clients = [member.client for member in fleet_of(engine).members]
    return [client.pid for client in clients if isinstance(client, ProcessClient)]


def produced(fleet: Fleet, number: int) -> dict[str, int]:
    """Tokens of the requests that a replica has."""
    entries = list(fleet._entries.values())
    return {entry.request_id: entry.position for entry in entries if entry.member is fleet.members[number]}


@pytest.mark.long
async def test_kill_9_of_one_of_two_replicas_under_load_changes_no_bit(engine: AsyncLLM) -> None:
    fleet, before = fleet_of(engine), pids(engine)
    undisturbed = await ask_all(engine, NUM_REQUESTS, text_request)
    running = asyncio.ensure_future(ask_all(engine, NUM_REQUESTS, text_request))
    while sum(produced(fleet, 0).values()) < 30:
        await asyncio.sleep(0.001)
    assert produced(fleet, 1)
    os.kill(before[0], signal.SIGKILL)
    disturbed = await running
    for number, (expected, found) in enumerate(zip(undisturbed, disturbed, strict=True)):
        assert found == expected, f"request {number}"
    assert engine.num_restarts == 1
    after = pids(engine)
    assert after[0] != before[0]
    assert after[1] == before[1]
    stats = await engine.stats()
    assert (stats.num_used_blocks, stats.num_used_host_blocks) == (0, 0)


@pytest.mark.long
async def test_requests_of_stopped_replicas_get_equal_tokens(engine: AsyncLLM) -> None:
    """Greedy and sampled ones, several sequences, logprobs, penalties, stop strings, constraints, thoughts, beams."""
    fleet = fleet_of(engine)
    undisturbed = await ask_all(engine, NUM_REQUESTS, text_request)
    for num_tokens in (10, 40, 90):
        running = asyncio.ensure_future(ask_all(engine, NUM_REQUESTS, text_request))
        for number in (0, 1):
            while sum(produced(fleet, number).values()) < num_tokens and not running.done():
                await asyncio.sleep(0.001)
            await engine.stop_replica(number)
            assert not produced(fleet, number)
            assert await engine.start_replica(number)
        for number, (expected, found) in enumerate(zip(undisturbed, await running, strict=True)):
            assert found == expected, f"request {number}"
    stats = await engine.stats()
    assert (stats.num_used_blocks, stats.num_used_host_blocks) == (0, 0)
    processes = [psutil.Process(pid) for pid in pids(engine)]
    engine.shutdown()
    assert all(has_ended(process) for process in processes)


def test_offline_engines_refuse_replicas() -> None:
    keywords: dict[str, Any] = {"data_parallel_size": 2}
    with pytest.raises(ConfigError, match="data_parallel_size=2 is for engines in processes of their own"):
        LLM(**keywords)
    with pytest.raises(ConfigError, match="data_parallel_size=2 is for engines in processes of their own"):
        AsyncLLM(in_process=True, **keywords)
