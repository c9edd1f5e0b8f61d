"""An engine process that is stopped, dead-locked, or in a long step, as the front end sees it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from quire.config.options import EngineOptions
from quire.engine.async_engine import AsyncLLM
from quire.engine.process_client import ProcessClient
from quire.errors import EngineDeadError, EngineUnresponsiveError
from quire.utils.heartbeat import SILENCE_LIMIT
from tests.engine.async_driving import begin, collect, pid_of, start, until_empty


async def test_a_stopped_process_is_unresponsive_until_it_goes_on(process_engine: AsyncLLM) -> None:
    task = await begin(process_engine, "a")
    process_engine.check_health()
    os.kill(pid_of(process_engine), signal.SIGSTOP)
    try:
        async with asyncio.timeout(120):
            while process_engine.silence < SILENCE_LIMIT:
                await asyncio.sleep(0.05)
        with pytest.raises(EngineUnresponsiveError, match="the engine process is stopped"):
            process_engine.check_health()
        with pytest.raises(EngineUnresponsiveError):
            await process_engine.kv_snapshot()
        with pytest.raises(EngineUnresponsiveError):
            await collect(process_engine, [1])
        assert process_engine.num_unfinished == 1, "a request that has begun waits"
    finally:
        os.kill(pid_of(process_engine), signal.SIGCONT)
    async with asyncio.timeout(120):
        while process_engine.silence > 1.5:
            await asyncio.sleep(0.05)
        process_engine.check_health()
        await process_engine.stats()
    assert not task.done()
    await process_engine.abort("a")
    assert await task
    await until_empty(process_engine)


async def until_beats(
    options: EngineOptions,
    executor: str,
    monkeypatch: pytest.MonkeyPatch,
    is_enough: Callable[[list[float]], bool],
    *,
    is_silent: bool,
) -> None:
    """Start a step of an hour, and wait until what the beats say (seconds without progress) is as it should be. The
    first beats may be from before the step."""
    engine = start(options, executor, in_process=False)
    running = asyncio.create_task(collect(engine, [1]))
    client = engine._session.client
    assert isinstance(client, ProcessClient)
    while engine.num_pending == 0:
        await asyncio.sleep(0.01)
    found: list[float] = []
    beat = client._heartbeat.beat

    def note(stalled: float = 0.0) -> None:
        found.append(stalled)
        beat(stalled)

    monkeypatch.setattr(client._heartbeat, "beat", note)
    try:
        async with asyncio.timeout(120):
            while not is_enough(found):
                await asyncio.sleep(0.05)
        if is_silent:
            with pytest.raises(EngineUnresponsiveError):
                engine.check_health()
        assert not running.done()
    finally:
        engine.shutdown(timeout=0.1)
    with pytest.raises(EngineDeadError):
        await running


@pytest.mark.long
async def test_a_long_step_is_no_silence(options: EngineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle process makes a turn a second, so that not each of its beats says 0."""
    await until_beats(options, "busy_step", monkeypatch, lambda found: found[-6:] == [0.0] * 6, is_silent=False)


async def test_a_dead_lock_is_silence(options: EngineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    await until_beats(options, "stuck_step", monkeypatch, lambda found: found[-1:] >= [SILENCE_LIMIT], is_silent=True)
