"""Calls to an engine that does not answer end with a reason."""

from __future__ import annotations

import asyncio

import pytest

from quire.engine.heartbeat import CALL_SECONDS, LONG_CALL_SECONDS, patience, wait_for_answer
from quire.errors import EngineUnresponsiveError


async def test_an_answer_that_is_there_is_taken_from_a_silent_engine_too() -> None:
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    answer.set_result(3)
    assert await wait_for_answer(answer, "stats", lambda: 1000.0) == 3


async def test_an_answer_is_waited_for() -> None:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[int] = loop.create_future()
    loop.call_soon(loop.call_soon, answer.set_result, 4)
    assert await wait_for_answer(answer, "stats", lambda: 0.0) == 4


async def test_a_silent_engine_is_not_waited_for() -> None:
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with pytest.raises(EngineUnresponsiveError, match="has not answered for 6 s"):
        await wait_for_answer(answer, "kv_snapshot", lambda: 6.2)
    assert not answer.done()


async def test_an_engine_that_falls_silent_meanwhile_ends_the_wait() -> None:
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    silences = iter((0.0, 9.0))
    with pytest.raises(EngineUnresponsiveError, match="has not answered for 9 s"):
        await wait_for_answer(answer, "kv_snapshot", lambda: next(silences))


async def test_the_time_of_a_call_is_limited() -> None:
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with pytest.raises(EngineUnresponsiveError, match="did not answer the call 'kv_snapshot' within 0 s"):
        await wait_for_answer(answer, "kv_snapshot", lambda: 0.0, limit=0.0)


def test_calls_that_work_get_more_time() -> None:
    assert {patience(name) for name in ("stats", "kv_snapshot", "reset_prefix_cache", "unregister_prefix")} == {
        CALL_SECONDS
    }
    assert {patience(name) for name in ("sleep", "wake_up", "register_prefix")} == {LONG_CALL_SECONDS}
