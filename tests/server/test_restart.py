"""`--restart-engine` over HTTP: clients of an engine that dies or hangs see nothing but time."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest

from quire.config.options import EngineOptions
from quire.engine.async_engine import AsyncLLM
from quire.errors import ConfigError
from tests.fakes.fates import Fates
from tests.long import all_but_long
from tests.processes import has_ended
from tests.server.conftest import Served, serving_apart
from tests.server.serve_process import Process
from tests.server.sse import events

GUARD_SECONDS = 120
"""Against a test that hangs; nothing here takes so long."""


@pytest.fixture
def fates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fates:
    return Fates(tmp_path, monkeypatch)


@pytest.fixture
async def apart(model_path: Path, fates: Fates) -> AsyncIterator[Served]:
    """The application over an engine in a process of its own, which is started again when it dies or hangs."""
    async with serving_apart(model_path, max_num_seqs=40, restart_engine=True, executor="fated") as served:
        yield served


def body(number: int, **fields: object) -> dict[str, object]:
    return {"prompt": f"abc{number}", "max_tokens": 40, "seed": number, "stream": True, "logprobs": 1, **fields}


BODIES = [
    *(body(number) for number in range(12)),
    *(body(number, n=2, stop=["XY", "Q"]) for number in range(12, 18)),
    body(18, n=2, best_of=3, stream=False),
    body(19, prompt=["ab", "cde"], stream=False),
]


async def ask(served: Served, fields: dict[str, object], *, again: bool = False) -> object:
    """What a client makes of the answer: of a stream the text, tokens and ends of each choice. again: the request comes
    again while an engine that hangs is known to, which refuses new ones."""
    answer = await served.client.post("/v1/completions", json=fields)
    while again and answer.status_code == 503:
        await asyncio.sleep(0.05)
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


async def until_restarting(served: Served) -> None:
    """The test keeps the gate closed: no engine starts before it opens."""
    while not served.engine.is_restarting:
        await asyncio.sleep(0.005)


async def test_streams_go_on_behind_two_deaths(apart: Served, fates: Fates) -> None:
    async with asyncio.timeout(GUARD_SECONDS):
        undisturbed = await asyncio.gather(*(ask(apart, fields) for fields in BODIES))
        num_before = apart.context.metrics.stats.generation_tokens_total
        fates.close_gate()
        fates.are(("die", 7), ("die", 12))
        running = [asyncio.ensure_future(ask(apart, fields)) for fields in BODIES]
        await until_restarting(apart)
        assert (await apart.client.get("/ready")).status_code == 503
        assert (await apart.client.get("/health")).status_code == 200, "the server mends itself: it must not be ended"
        late = asyncio.ensure_future(ask(apart, BODIES[0]))
        fates.open_gate()
        assert await asyncio.gather(*running) == undisturbed
        assert await late == undisturbed[0]
        assert (await apart.client.get("/ready")).status_code == 200
        metrics = (await apart.client.get("/metrics")).text
        assert [line for line in metrics.splitlines() if "engine_restarts_total 2" in line]
        assert apart.context.metrics.stats.generation_tokens_total > num_before, "counters go on"
        await apart.until_idle()


@pytest.mark.long
@pytest.mark.parametrize("fate", ["stop", "lock"])
async def test_streams_go_on_behind_an_engine_that_hangs(apart: Served, fates: Fates, fate: str) -> None:
    """A process that is stopped as a whole, and one whose main thread waits for what never comes."""
    async with asyncio.timeout(GUARD_SECONDS):
        undisturbed = await asyncio.gather(*(ask(apart, fields) for fields in BODIES))
        fates.are((fate, 9))
        assert await asyncio.gather(*(ask(apart, fields, again=True) for fields in BODIES)) == undisturbed
        assert apart.engine.num_restarts == 1
        assert (await apart.client.get("/health")).status_code == 200
        await apart.until_idle()


async def test_clients_that_leave_while_an_engine_starts(apart: Served, fates: Fates) -> None:
    async with asyncio.timeout(GUARD_SECONDS):
        [stays] = await asyncio.gather(ask(apart, BODIES[0]))
        fates.close_gate()
        fates.are(("die", 7))
        running = [asyncio.ensure_future(ask(apart, fields)) for fields in BODIES]
        await until_restarting(apart)
        new = asyncio.ensure_future(ask(apart, BODIES[1]))
        while apart.engine.num_unfinished <= len(BODIES):
            await asyncio.sleep(0.005)
        for task in (*running[1:], new):
            task.cancel()
        await asyncio.gather(*running[1:], new, return_exceptions=True)
        while apart.engine.num_unfinished > 1:
            await asyncio.sleep(0.005)
        fates.open_gate()
        assert await running[0] == stays
        await apart.until_idle()


@pytest.mark.parametrize(
    ("shutdown_timeout", "reason"), all_but_long([(1000.0, "length"), (0.1, "abort")], [(0.1, "abort")])
)
async def test_sigterm_while_an_engine_starts(
    model_path: Path, fates: Fates, processes: list[Process], shutdown_timeout: float, reason: str
) -> None:
    """What runs goes on in the next engine, or ends at the time limit, and the start with it."""
    process = Process(model_path, "fated", restart_engine=True, shutdown_timeout=shutdown_timeout).wait_ready()
    processes.append(process)
    fates.close_gate()
    fates.are(("die", 5))
    body = {"prompt": "abc", "max_tokens": 200, "stream": True}
    async with (
        asyncio.timeout(GUARD_SECONDS),
        httpx.AsyncClient(base_url=process.url, timeout=GUARD_SECONDS) as client,
    ):
        answer = asyncio.ensure_future(client.post("/v1/completions", json=body))
        while (await client.get("/ready")).status_code == 200:
            await asyncio.sleep(0.01)
        while not (starting := psutil.Process(process.popen.pid).children()):
            await asyncio.sleep(0.01)
        process.signal(signal.SIGTERM)
        if reason == "length":
            while (await client.get("/health")).status_code == 200:
                await asyncio.sleep(0.01)
            fates.open_gate()
        *_, last, done = events((await answer).text)
    assert (last["choices"][0]["finish_reason"], done) == (reason, "[DONE]")
    status, error = await asyncio.to_thread(process.finish)
    assert status == 0, error
    assert all(has_ended(engine) for engine in starting)


def test_an_engine_in_this_process_cannot_be_restarted(model_path: Path) -> None:
    with pytest.raises(ConfigError, match="restart_engine needs the engine in a process of its own"):
        AsyncLLM.from_options(EngineOptions(model=str(model_path)), in_process=True, restart_engine=True)
