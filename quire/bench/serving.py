"""`quire bench serve`: requests at a given rate against any OpenAI-compatible server, from one asyncio process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import httpx

from quire.bench.datasets import PromptSpec
from quire.bench.metrics import RequestRecord
from quire.bench.openai_client import ClientSettings, open_client, stream_request


async def run_load(
    settings: ClientSettings,
    prompts: Sequence[PromptSpec],
    offsets: Sequence[float],
    *,
    max_concurrency: int | None,
    timeout: float,
    on_done: Callable[[], None],
) -> list[RequestRecord]:
    """Send prompt i at `offsets[i]` seconds from the start and follow all streams; records are in prompt order.

    max_concurrency: requests that may be open at once; later ones wait in the client, which their latencies do not
    include (`RequestRecord.sent` is when they go out). timeout: seconds without a byte.
    """
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()

    async def one(client: httpx.AsyncClient, prompt: PromptSpec, due: float) -> RequestRecord:
        async with gate:
            record = await stream_request(client, settings, prompt, due)
        on_done()
        return record

    async with open_client(settings, timeout=timeout) as client, asyncio.TaskGroup() as group:
        start = time.perf_counter()
        tasks = []
        for prompt, offset in zip(prompts, offsets, strict=True):
            due = start + offset
            delay = due - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(group.create_task(one(client, prompt, due)))
    return [task.result() for task in tasks]
