"""SageMaker's address: each body gets the answer of the route that it is for."""

from __future__ import annotations

from typing import Any

import pytest

from quire.server.errors import ApiError
from quire.server.invocations import path_of
from tests.server.conftest import Served
from tests.server.sse import chunks

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
COMPLETION = {"prompt": "abc", "max_tokens": 3, "temperature": 0}
CHANGING = ("id", "created", "usage")


async def answers(served: Served, path: str, body: object) -> list[dict[str, Any]]:
    """The answers of /invocations and of `path`, without what changes from one answer to the next."""
    found = []
    for each in ("/invocations", path):
        answer = (await served.client.post(each, json=body)).json()
        found.append({name: value for name, value in answer.items() if name not in CHANGING})
        await served.until_idle()
    return found


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
async def test_answers_are_those_of_the_route(served: Served, path: str, body: dict[str, Any]) -> None:
    mine, theirs = await answers(served, path, body)
    assert mine == theirs
    assert mine["choices"]
    wrong = {**body, "temperature": -1}
    mine, theirs = await answers(served, path, wrong)
    assert mine == theirs
    assert mine["error"]["param"] == "temperature"
    streamed = (await served.client.post("/invocations", json={**body, "stream": True, "colour": 1})).text
    assert chunks(streamed)[-1]["choices"][0]["finish_reason"] == "length"
    large = {**body, "user": "u" * 2**21}
    assert (await served.client.post("/invocations", json=large)).status_code == 200


async def test_unknown_fields_are_reported(served: Served) -> None:
    answer = await served.client.post("/invocations", json={**COMPLETION, "colour": 1})
    assert answer.headers["x-quire-ignored"] == "colour"


async def test_a_client_that_leaves_ends_its_request(live: Served) -> None:
    body = {**COMPLETION, "max_tokens": 200, "stream": True}
    async with live.client.stream("POST", "/invocations", json=body) as got:
        assert await anext(got.aiter_bytes())
    await live.until_idle()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"inputs": "abc"}', "Cannot find suitable handler for request. Expected one of: messages, prompt"),
        (b'{"prompt": null}', "Cannot find suitable handler"),
        (b"{not json", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b"", "is empty"),
        (b'{"prompt": "\xff"}', "not valid UTF-8"),
    ],
)
async def test_bodies_of_no_route(served: Served, content: bytes, message: str) -> None:
    answer = await served.client.post("/invocations", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("task", "names", "path"),
    [
        (None, ["messages", "model"], "/v1/chat/completions"),
        (None, ["prompt"], "/v1/completions"),
        ("embed", ["input"], "/v1/embeddings"),
        ("embed", ["messages"], "/v1/embeddings"),
        ("embed", ["text_1", "text_2"], "/score"),
        ("embed", ["queries", "documents"], "/score"),
        ("embed", ["query", "documents"], "/rerank"),
        ("classify", ["input"], "/classify"),
        ("classify", ["data_1", "data_2"], "/score"),
    ],
)
def test_the_route_of_a_body(task: str | None, names: list[str], path: str) -> None:
    assert path_of(names, task) == path


def test_a_model_that_pools_completes_nothing() -> None:
    with pytest.raises(ApiError, match="Expected one of: input, messages, text_1"):
        path_of(["prompt"], "embed")
