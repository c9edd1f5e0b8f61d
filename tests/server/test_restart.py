"""`--restart-engine` over HTTP: clients of an engine that is killed see nothing but time."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quire.config.options import EngineOptions
from quire.engine.async_engine import AsyncLLM
from quire.engine.process_client import ProcessClient
from quire.engine.restarting_client import RestartingClient
from quire.errors import ConfigError
from tests.server.conftest import Served, serving_apart
from tests.server.sse import events

GUARD_SECONDS = 120
"""Against a test that hangs; nothing here takes so long."""


@pytest.fixture
async def apart(model_path: Path) -> AsyncIterator[Served]:
    """The application over an engine in a process of its own, which is started again when it dies."""
    async with serving_apart(model_path, max_num_seqs=40, restart_engine=True) as served:
        yield served


def kill_engine(served: Served) -> None:
    client = served.engine._client
    assert isinstance(client, RestartingClient)
    assert isinstance(client.client, ProcessClient)
    os.kill(client.client.pid, signal.SIGKILL)


def body(number: int, **fields: object) -> dict[str, object]:
    return {"prompt": f"abc{number}", "max_tokens": 40, "seed": number, "stream": True, "logprobs": 1, **fields}


BODIES = [
    *(body(number) for number in range(12)),
    *(body(number, n=2, stop=["XY", "Q"]) for number in range(12, 18)),
    body(18, n=2, best_of=3, stream=False),
    body(19, prompt=["ab", "cde"], stream=False),
]


async def ask(served: Served, fields: dict[str, object]) -> object:
    """What a client makes of the answer: of a stream the text, tokens and ends of each choice."""
    answer = await served.client.post("/v1/completions", json=fields)
    assert answer.status_code == 200, answer.text
    if not fields["stream"]:
        return [(c["index"], c["text"], c["finish_reason"], c["logprobs"]) for c in answer.json()["choices"]]
    choices: dict[int, list[object]] = {}
    for event in events(answer.text):
        if event == "[DONE]":
            continue
        assert "error" not in event, event
        for choice in event["choices"]:
            told = choices.setdefault(choice["index"], ["", [], [], None])
            told[0] += choice["text"]
            told[1] += choice["logprobs"]["tokens"] if choice["logprobs"] else []  # type: ignore[operator]
            told[2] += choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []  # type: ignore[operator]
            told[3] = choice["finish_reason"] or told[3]
    return choices


async def test_streams_go_on_behind_two_deaths(apart: Served) -> None:
    async with asyncio.timeout(GUARD_SECONDS):
        undisturbed = await asyncio.gather(*(ask(apart, fields) for fields in BODIES))
        running = [asyncio.ensure_future(ask(apart, fields)) for fields in BODIES]
        num_before = apart.context.metrics.stats.generation_tokens_total
        for num_tokens in (150, 600):
            while apart.context.metrics.stats.generation_tokens_total < num_before + num_tokens:
                await asyncio.sleep(0.005)
            kill_engine(apart)
            while not apart.engine.is_restarting:
                await asyncio.sleep(0.005)
            assert (await apart.client.get("/ready")).status_code == 503
            assert (await apart.client.get("/health")).status_code == 200, (
                "the server mends itself: it must not be ended"
            )
        late = asyncio.ensure_future(ask(apart, BODIES[0]))
        assert await asyncio.gather(*running) == undisturbed
        assert await late == undisturbed[0]
        assert (await apart.client.get("/ready")).status_code == 200
        metrics = (await apart.client.get("/metrics")).text
        assert [line for line in metrics.splitlines() if "engine_restarts_total 2" in line]
        assert apart.context.metrics.stats.generation_tokens_total > num_before, "counters go on"
        await apart.until_idle()


def test_an_engine_in_this_process_cannot_be_restarted(model_path: Path) -> None:
    with pytest.raises(ConfigError, match="restart_engine needs the engine in a process of its own"):
        AsyncLLM.from_options(EngineOptions(model=str(model_path)), in_process=True, restart_engine=True)
