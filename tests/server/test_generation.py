"""Prompts side by side: what a client has not taken stays where it is merged."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from quire.outputs import RequestOutput
from quire.server.generation import merged


def output(step: int, finished: bool) -> RequestOutput:
    return RequestOutput(str(step), None, [], [], finished)


async def test_a_client_that_takes_nothing_leaves_the_outputs_in_their_streams() -> None:
    taken = [0, 0, 0]

    async def stream(index: int) -> AsyncGenerator[RequestOutput, None]:
        for step in range(100):
            taken[index] += 1
            yield output(step, step == 99)

    items = merged([stream(index) for index in range(3)])
    await anext(items)
    assert max(taken) <= 2, "one in the queue, and one more of the stream whose output the client has"
    await items.aclose()


async def test_all_outputs_of_all_streams_come_in_order() -> None:
    async def stream(index: int) -> AsyncGenerator[RequestOutput, None]:
        for step in range(10 * (index + 1)):
            yield output(step, step == 10 * (index + 1) - 1)

    found: dict[int, list[str]] = {0: [], 1: [], 2: []}
    async for index, each in merged([stream(index) for index in range(3)]):
        found[index].append(each.request_id)
    assert found == {index: [str(step) for step in range(10 * (index + 1))] for index in range(3)}
