"""Which priorities a client may send."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.server.settings import ServerSettings
from tests.server.conftest import Served, serving

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
COMPLETION = {"prompt": "hi", "max_tokens": 1}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}


async def statuses(served: Served, *priorities: int) -> list[int]:
    found = set()
    for path, body in BODIES.items():
        found.add(
            tuple([(await served.client.post(path, json={**body, "priority": p})).status_code for p in priorities])
        )
    (same,) = found
    return list(same)


RESPONSE = {"input": "hi", "max_output_tokens": 1}
BATCH = {"messages": [CHAT["messages"]], "max_tokens": 1}
MESSAGE = {**CHAT, "model": "tiny"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *BODIES.items(),
        ("/v1/responses", RESPONSE),
        ("/v1/chat/completions/batch", BATCH),
        ("/v1/messages", MESSAGE),
    ],
)
async def test_first_come_first_served_notes_a_priority(served: Served, path: str, body: dict[str, object]) -> None:
    for priority in (7, -(2**63)):
        answer = await served.client.post(path, json={**body, "priority": priority})
        assert (answer.status_code, answer.headers["x-quire-ignored"]) == (200, "priority")
    answer = await served.client.post(path, json={**body, "priority": 0})
    assert (answer.status_code, answer.headers.get("x-quire-ignored")) == (200, None)


async def test_with_priorities_a_client_may_step_back_and_not_ahead(model_path: Path) -> None:
    async with serving(model_path, scheduling_policy="priority") as served:
        assert await statuses(served, 0, 1, 100, -1, -100) == [200, 200, 200, 400, 400]
        error = (await served.client.post("/v1/completions", json={**COMPLETION, "priority": -1})).json()["error"]
        assert error["message"] == "priority must be between 0 and 100 on this server (--priority-range), not -1"


async def test_the_range_is_the_operators(model_path: Path) -> None:
    settings = ServerSettings(served_model_name=["tiny"], priority_range="-2,3")
    async with serving(model_path, settings, scheduling_policy="priority") as served:
        assert await statuses(served, -3, -2, 0, 3, 4) == [400, 200, 200, 200, 400]


@pytest.mark.parametrize("text", ["", "1", "1,2", "-1,-1", "0,101", "-101,0", "a,b", "0,1,2", "3,-3"])
def test_a_range_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="priority_range must be LOW,HIGH") as caught:
        ServerSettings(priority_range=text)
    assert caught.value.param == "priority_range"
