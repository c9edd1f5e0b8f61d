"""Prompts side by side: what a client has not taken stays where it is merged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest

from quire.outputs import RequestOutput
from quire.server import generation
from quire.server.generation import _merge, render_chat
from quire.server.protocol.chat import ChatRequest
from tests.server.conftest import Served


def output(step: int, finished: bool) -> RequestOutput:
    return RequestOutput(str(step), None, [], [], finished)


async def test_a_client_that_takes_nothing_leaves_the_outputs_in_their_streams() -> None:
    taken = [0, 0, 0]

    async def stream(index: int) -> AsyncGenerator[RequestOutput, None]:
        for step in range(100):
            taken[index] += 1
            yield output(step, step == 99)

    merged = _merge([stream(index) for index in range(3)])
    await anext(merged)
    assert max(taken) <= 2, "one in the queue, and one more of the stream whose output the client has"
    await merged.aclose()


async def test_all_outputs_of_all_streams_come_in_order() -> None:
    async def stream(index: int) -> AsyncGenerator[RequestOutput, None]:
        for step in range(10 * (index + 1)):
            yield output(step, step == 10 * (index + 1) - 1)

    found: dict[int, list[str]] = {0: [], 1: [], 2: []}
    async for index, each in _merge([stream(index) for index in range(3)]):
        found[index].append(each.request_id)
    assert found == {index: [str(step) for step in range(10 * (index + 1))] for index in range(3)}


async def test_a_long_conversation_is_freed_but_for_its_last_message(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["first", [{"type": "text", "text": "second"}], "third"]

    def request() -> ChatRequest:
        messages = [{"role": "user", "content": text} for text in texts]
        return msgspec.convert({"messages": messages}, ChatRequest)

    kept, freed = request(), request()
    expected = await render_chat(served.context, kept)
    assert len(kept.messages) == 3
    monkeypatch.setattr(generation, "INLINE_CHARACTERS", 0)
    assert await render_chat(served.context, freed) == expected
    async with asyncio.timeout(60):
        while len(freed.messages) > 1:
            await asyncio.sleep(0.001)
    assert freed.messages == kept.messages[-1:]
