"""`quire bench serve`: requests at a given rate to any OpenAI-compatible server. Arrivals are drawn before the run, so
the server cannot influence them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence

import httpx

from quire.bench.datasets import PromptSpec
from quire.bench.metrics import RequestRecord
from quire.bench.openai_client import ClientSettings, open_client, stream_request
from quire.errors import UserError


async def run_load(
    settings: ClientSettings,
    prompts: Sequence[PromptSpec],
    offsets: Sequence[float],
    *,
    max_concurrency: int | None,
    timeout: float,
    on_done: Callable[[RequestRecord], None],
) -> list[RequestRecord]:
    """Send prompt i at `offsets[i]` seconds from the start and follow all streams; records are in prompt order.
    max_concurrency: limit of open requests; later ones wait in the client, outside their latencies
    (`RequestRecord.sent`). timeout: seconds without a byte."""
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()

    async def one(client: httpx.AsyncClient, prompt: PromptSpec, due: float) -> RequestRecord:
        async with gate:
            record = await stream_request(client, settings, prompt, due)
        on_done(record)
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


def arrival_offsets(num_requests: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Seconds from the start at which each request is due; ascending, the first at 0. rate: requests per second,
    `math.inf` for all at once. burstiness: shape of the gamma distribution of the gaps; 1 is a Poisson process, below 1
    burstier, above 1 more even. Raises UserError for non-positive values."""
    if not rate > 0:
        raise UserError(f"--request-rate must be positive or inf, not {rate:g}", param="request_rate")
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise UserError(f"--burstiness must be a positive number, not {burstiness:g}", param="burstiness")
    if math.isinf(rate):
        return [0.0] * num_requests
    return list(_accumulate(num_requests, rate, burstiness, rng))


def _accumulate(num_requests: int, rate: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    offset = 0.0
    for index in range(num_requests):
        if index:
            offset += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        yield offset
