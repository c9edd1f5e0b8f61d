"""Outputs, aborts and errors of a request reach its stream and the listeners in the order in which they happened."""

from __future__ import annotations

import asyncio

import pytest

from quire.engine.async_engine import AsyncLLM
from quire.engine.messages import EngineOutputs
from quire.engine.output_stream import StatsListener
from quire.errors import InternalError
from quire.outputs import RequestOutput, SequenceUpdate
from tests.engine.async_driving import LONG


class Heard(StatsListener):
    """The outputs, as far as they are recorded: finished or not."""

    def __init__(self) -> None:
        self.finished: list[bool] = []

    def record_outputs(self, outputs: list[RequestOutput]) -> None:
        self.finished += [output.finished for output in outputs]


async def started(engine: AsyncLLM, *, delta: bool) -> tuple[asyncio.Task[list[RequestOutput]], str]:
    """A request whose first output has come, and its key."""

    async def outputs() -> list[RequestOutput]:
        return [output async for output in engine.generate([1, 2, 3], LONG, "a", delta=delta)]

    task = asyncio.ensure_future(outputs())
    while not (engine._session._keys and (await engine.stats()).num_running):
        await asyncio.sleep(0)
    return task, engine._session._keys["a"]


@pytest.mark.parametrize("delta", [True, False])
async def test_an_abort_comes_behind_outputs_under_way(engine: AsyncLLM, delta: bool) -> None:
    """The receiver thread has taken an output, and the event loop has not handed it over."""
    engine.add_listener(heard := Heard())
    task, key = await started(engine, delta=delta)
    engine._session._take(EngineOutputs([SequenceUpdate(key, 0, [11, 12])]))
    await engine.abort("a")
    outputs = await asyncio.wait_for(task, 120)
    tokens = [token for output in outputs for each in output.outputs for token in each.token_ids]
    assert tokens[-2:] == [11, 12]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert heard.finished[-1]
    assert not any(heard.finished[:-1])


@pytest.mark.parametrize("fails", [True, False])
async def test_listeners_hear_of_an_end_last(engine: AsyncLLM, fails: bool) -> None:
    """A request that fails as it is sent, or whose consumer leaves."""
    engine.add_listener(heard := Heard())
    task, key = await started(engine, delta=True)
    engine._session._take(EngineOutputs([SequenceUpdate(key, 0, [11])]))
    if fails:
        engine._session._fail(engine._session._streams[key], InternalError("not sent"))
    else:
        task.cancel()
    [error] = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(error, InternalError if fails else asyncio.CancelledError)
    while not (heard.finished and heard.finished[-1]):
        await asyncio.sleep(0)
    assert not any(heard.finished[:-1])
