"""Helpers to drive an AsyncLLM over a fake executor."""

from __future__ import annotations

import asyncio

import msgspec

from quire.config.options import EngineOptions
from quire.engine.async_engine import AsyncLLM
from quire.engine.process_client import ProcessClient
from quire.kv_cache.stats import EngineStats
from quire.sampling_params import SamplingParams

FAKES = "tests.fakes.factories:"
SHORT = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)


def start(options: EngineOptions, executor: str = "plain", *, in_process: bool = True) -> AsyncLLM:
    options = msgspec.structs.replace(options, skip_tokenizer_init=True)
    return AsyncLLM.from_options(options, in_process=in_process, executor=FAKES + executor)


async def collect(engine: AsyncLLM, prompt: list[int], params: SamplingParams = SHORT, **keywords: object) -> list[int]:
    """All token ids of the first completion, from deltas."""
    tokens: list[int] = []
    async for output in engine.generate(prompt, params, delta=True, **keywords):  # type: ignore[arg-type]
        for completion in output.outputs:
            tokens += completion.token_ids
    return tokens


async def begin(engine: AsyncLLM, request_id: str) -> asyncio.Task[list[int]]:
    """A long request, already running."""
    task = asyncio.create_task(collect(engine, [1, 2, 3], LONG, request_id=request_id))
    while (await engine.stats()).num_running == 0:
        await asyncio.sleep(0.01)
    return task


async def until_empty(engine: AsyncLLM) -> EngineStats:
    while (stats := await engine.stats()).num_used_blocks or engine.num_unfinished:
        await asyncio.sleep(0.01)
    return stats


def pid_of(engine: AsyncLLM) -> int:
    client = engine._session.client
    assert isinstance(client, ProcessClient)
    return client.pid
