"""Pause and sleep through the front end."""

from __future__ import annotations

import asyncio

import pytest

from quire.engine.async_engine import AsyncLLM
from quire.engine.messages import CallResult
from quire.errors import EngineUnresponsiveError, UserError
from tests.engine.async_driving import begin, collect


async def test_two_calls_to_sleep_that_are_given_up(engine: AsyncLLM) -> None:
    running = await begin(engine, "a")
    calls = []
    for _ in range(2):
        calls.append(asyncio.create_task(engine.sleep(1, "wait")))
        await asyncio.sleep(0)
    assert engine._session.control.is_asleep
    for call in calls:
        call.cancel()
        await asyncio.wait([call])
    assert len(await collect(engine, [4, 5])) == 6
    await engine.abort("a")
    await running


async def test_sleep_does_not_wait_for_what_a_pause_holds(engine: AsyncLLM) -> None:
    running = await begin(engine, "a")
    await engine.pause("keep")
    with pytest.raises(UserError, match="resume"):
        await engine.sleep(1, "wait")
    await engine.resume()
    assert len(await collect(engine, [4, 5])) == 6
    await engine.abort("a")
    await running


async def test_a_resume_that_is_answered_too_late(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    await engine.pause("wait")
    ask = engine._session.ask

    async def late(method: str, argument: str = "") -> CallResult:
        await ask(method, argument)
        raise EngineUnresponsiveError("no answer so far")

    with monkeypatch.context() as patched:
        patched.setattr(engine._session, "ask", late)
        with pytest.raises(EngineUnresponsiveError):
            await engine.resume()
    assert not engine.pauses
    assert not engine.refuses_new
    assert len(await collect(engine, [4, 5])) == 6
