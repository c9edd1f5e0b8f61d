"""No request keeps the others from the batch, and none notices that it takes turns."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from quire.engine.messages import Abort, AddRequest
from quire.server.request_share import Turns, share_of, split
from tests.fakes.core import CoreDriver, make_config
from tests.server.conftest import Served, serving
from tests.server.sse import chunks

ROWS = 8


def test_shares_and_parts() -> None:
    assert [share_of(rows) for rows in (1, 2, 4, 8, 128, 256)] == [1, 1, 3, 6, 96, 192]
    assert list(split(14, 6)) == [(0, 6), (6, 6), (12, 2)]


async def test_places_are_given_in_order_and_come_back() -> None:
    turns, order = Turns(6), []

    async def take(name: str, num_places: int) -> None:
        await turns.take(num_places)
        order.append(name)

    await take("a", 4)
    waiting = [asyncio.ensure_future(take(name, size)) for name, size in (("b", 6), ("c", 1), ("d", 2))]
    await asyncio.sleep(0)
    assert order == ["a"], "c does not pass b"
    waiting[0].cancel()
    await waiting[1]
    assert order == ["a", "c"], "two places are not left for d"
    turns.give_back(4)
    await asyncio.gather(*waiting, return_exceptions=True)
    assert order == ["a", "c", "d"]
    turns.give_back(3)
    await asyncio.wait_for(turns.take(6), 60)


async def test_places_are_not_given_to_those_that_are_being_cancelled() -> None:
    """All at once, as when a loop is closed: some waits are cancelled and have not noticed."""
    turns = Turns(4)
    await turns.take(4)
    waiting = [asyncio.ensure_future(turns.take(2)) for _ in range(3)]
    await asyncio.sleep(0)
    for task in waiting[:2]:
        task.cancel()
    turns.give_back(2)
    await asyncio.gather(*waiting, return_exceptions=True)
    assert [task.cancelled() for task in waiting] == [True, True, False]
    turns.give_back(4)
    await asyncio.wait_for(turns.take(4), 60)


FIELDS: list[dict[str, Any]] = [
    {"prompt": "hello", "n": 14, "seed": 7, "max_tokens": 4},
    {"prompt": "hello", "n": 8, "seed": 7, "max_tokens": 4, "logprobs": 2, "prompt_logprobs": 1, "echo": True},
    {"prompt": ["hello", "abc", "x"], "n": 7, "seed": 7, "max_tokens": 3, "return_token_ids": True},
    {"prompt": [[65 + i, 66] for i in range(20)], "seed": 7, "max_tokens": 3},
]


def stable(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: answer[name] for name in ("choices", "usage")}


@pytest.mark.parametrize("fields", FIELDS)
async def test_the_answer_does_not_depend_on_turns(model_path: Path, fields: dict[str, Any]) -> None:
    answers, texts = [], []
    for rows in (64, ROWS):
        async with serving(model_path, max_num_seqs=rows) as served:
            answers.append(stable((await served.client.post("/v1/completions", json=fields)).json()))
            await served.until_idle()
            streamed = await served.client.post("/v1/completions", json={**fields, "stream": True})
            found: dict[int, str] = {}
            for event in chunks(streamed.text):
                for choice in event["choices"]:
                    found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
            texts.append(found)
            await served.until_idle()
    assert answers[0] == answers[1]
    assert texts[0] == texts[1] == {choice["index"]: choice["text"] for choice in answers[0]["choices"]}


@pytest.mark.parametrize("fields", FIELDS)
async def test_no_request_has_more_than_its_share_in_the_engine(served: Served, fields: dict[str, Any]) -> None:
    """Sequences that were sent to the engine, less those whose ends have come."""
    live: dict[str, int] = {}
    most = [0]
    send, take = served.engine._session.client.send, served.engine._session._take

    def sent(*messages: Any) -> None:
        for message in messages:
            if isinstance(message, AddRequest):
                live[message.request.request_id] = message.request.params.num_sequences
                most[0] = max(most[0], sum(live.values()))
            elif isinstance(message, Abort):
                live.pop(message.request_id, None)
        send(*messages)

    def taken(outputs: Any) -> None:
        for update in outputs.updates:
            if update.finish_reason is not None:
                live[update.request_id] -= 1
        take(outputs)

    served.engine._session.client.send = sent  # type: ignore[method-assign]
    served.engine._session._take = taken  # type: ignore[method-assign]
    response = await served.client.post("/v1/completions", json=fields)
    assert response.status_code == 200
    assert 0 < most[0] <= share_of(ROWS)


def test_another_request_has_its_first_token_at_once() -> None:
    """Beside a request that has its share, a second one does not wait for any of its sequences to end."""
    driver = CoreDriver(make_config(max_num_seqs=ROWS))
    driver.add("large", [1, 2, 3], n=share_of(ROWS), max_tokens=60)
    for _ in range(5):
        driver.step()
    driver.add("small", [4, 5, 6], max_tokens=1)
    num_steps = 0
    while ("small", 0) not in driver.finished:
        driver.step()
        num_steps += 1
    assert num_steps <= 3
    assert not any(name == "large" for name, _ in driver.finished)


async def test_what_is_compared_has_to_fit_the_share(served: Served) -> None:
    for more in ({"best_of": 7}, {"use_beam_search": True, "beam_width": 7}):
        response = await served.client.post("/v1/completions", json={"prompt": "a", **more})
        assert response.status_code == 400
        assert "at most 6 sequences that are compared" in response.json()["error"]["message"]
    assert (await served.client.post("/v1/completions", json={"prompt": "a", "best_of": 6})).status_code == 200


async def test_a_time_limit_runs_while_a_part_waits_for_its_turn(served: Served) -> None:
    fields = {"prompt": "a", "n": 14, "timeout_s": 1e-6, "max_tokens": 50}
    answer = (await served.client.post("/v1/completions", json=fields)).json()
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"timeout"}
    assert len(answer["choices"]) == 14


async def test_a_client_that_leaves_takes_the_parts_that_wait_with_it(live: Served) -> None:
    body = {"prompt": "a", "n": 32, "max_tokens": 200, "ignore_eos": True, "stream": True}
    async with live.client.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_lines():
            break
    await live.until_idle()


@pytest.mark.parametrize("fields", [{"prompt": "hello", "n": 14}, {"prompt": ["hello"] * 14}, {"prompt": "a", "n": 3}])
async def test_parts_of_an_unseeded_request_draw_from_seeds_of_their_own(
    model_path: Path, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    async with serving(model_path, max_num_seqs=ROWS) as served:
        send = served.engine._session.client.send

        def noting(*messages: Any) -> None:
            sent.extend(message.request for message in messages if isinstance(message, AddRequest))
            send(*messages)

        monkeypatch.setattr(served.engine._session.client, "send", noting)
        await served.client.post("/v1/completions", json={**fields, "max_tokens": 2, "temperature": 1.0})
    assert sum(request.params.num_sequences for request in sent) == (fields.get("n") or 14)
    assert len({request.seed for request in sent}) == len(sent)
