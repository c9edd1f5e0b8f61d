"""kill -9 of engines over the bundled model: every request ends with the tokens and logprobs of an undisturbed run.

The long form (`make soak-restart`) kills many times: `python -m tests.e2e.test_restart --deaths 50`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import signal
import time

from quire import AsyncLLM, SamplingParams
from quire.engine.process_client import ProcessClient
from quire.engine.restarting_client import RestartingClient
from quire.outputs import RequestOutput

TEXT = "def read(path):\n    with open(path) as file:\n        return [line.split() for line in file]\n\n\ndef "
OPTIONS = {
    "num_blocks_override": 22,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 96,
    "preemption_mode": "swap",
    "swap_space": "16MiB",
    "num_threads": 1,
}
"""A pool that the requests do not fit into together: they preempt and swap one another."""
PENALTIES = {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
STOPS = {"stop": ["\n\n", "return"], "min_tokens": 5, "include_stop_str_in_output": True}
KINDS: list[dict[str, object]] = [
    {"temperature": 0.0, "max_tokens": 60},
    {"temperature": 0.9, "max_tokens": 50, "n": 3, "logprobs": 2},
    {
        "temperature": 1.1,
        "max_tokens": 50,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
    },
    {
        "temperature": 0.8,
        "max_tokens": 60,
        "stop": ["\n\n", "return"],
        "min_tokens": 5,
        "include_stop_str_in_output": True,
    },
    {"temperature": 1.0, "max_tokens": 40, "top_p": 0.9, "top_k": 40, "logit_bias": {40: 2.0}, "bad_words": ["self"]},
    {"temperature": 0.7, "max_tokens": 30, "n": 2, "best_of": 4},
    {"temperature": 0.0, "max_tokens": 16, "n": 3, "use_beam_search": True},
    {"temperature": 0.9, "max_tokens": 30, "prompt_logprobs": 1, "logprobs": 0},
    {"temperature": 0.9, "max_tokens": 40, "structured_outputs": {"regex": "[a-z]{3,20}(, [a-z]{2,9}){2,5}"}},
    {
        "temperature": 1.0,
        "max_tokens": 60,
        "n": 2,
        "structured_outputs": {
            "regex": r'\{"first_name":"[a-z]{2,8}","last_name":"[a-z]{2,8}","confirmed":(true|false)\}'
        },
    },
]


async def ask(engine: AsyncLLM, number: int) -> object:
    """What the caller of request `number` gets."""
    params = SamplingParams(seed=number, **KINDS[number % len(KINDS)])  # type: ignore[arg-type]
    last: RequestOutput | None = None
    async for output in engine.generate(TEXT[: 20 + number % 60], params):
        last = output
    assert last is not None
    assert last.finished
    completions = [
        (c.index, c.text, c.token_ids, c.logprobs, c.cumulative_logprob, c.finish_reason, c.stop_reason, c.score)
        for c in last.outputs
    ]
    return completions, last.prompt_logprobs


async def ask_all(engine: AsyncLLM, num_requests: int) -> list[object]:
    return await asyncio.gather(*(ask(engine, number) for number in range(num_requests)))


async def kill_at_random(engine: AsyncLLM, rng: random.Random, num_deaths: int) -> None:
    """Each time when some requests have begun, and behind a random number of further tokens."""
    client = engine._client
    assert isinstance(client, RestartingClient)
    for _ in range(num_deaths):
        until = (await engine.stats()).generation_tokens_total + rng.randrange(150, 500)
        while (await engine.stats()).generation_tokens_total < until and engine.num_unfinished:
            await asyncio.sleep(0.002)
        if not engine.num_unfinished:
            return
        num_restarts = engine.num_restarts
        assert isinstance(client.client, ProcessClient)
        os.kill(client.client.pid, signal.SIGKILL)
        while engine.num_restarts == num_restarts:
            await asyncio.sleep(0.01)


async def run(num_requests: int, num_deaths: int, seed: int) -> tuple[int, int]:
    """Run the requests twice, once with deaths. Returns how many deaths there were, and how many swaps."""
    engine = AsyncLLM(restart_engine=True, **OPTIONS)
    try:
        undisturbed = await ask_all(engine, num_requests)
        num_swaps = (await engine.stats()).swap_preemptions_total
        killing = asyncio.ensure_future(kill_at_random(engine, random.Random(seed), num_deaths))
        disturbed = await ask_all(engine, num_requests)
        await killing
        for number, (before, after) in enumerate(zip(undisturbed, disturbed, strict=True)):
            assert before == after, f"request {number}"
        assert (await engine.stats()).num_used_blocks == 0
        return engine.num_restarts, num_swaps
    finally:
        engine.shutdown()


async def test_kill_9_under_load_changes_no_bit() -> None:
    num_deaths, num_swaps = await run(18, 1, seed=1)
    assert num_deaths == 1
    assert num_swaps > 0, "the requests are to be swapped as well"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=50)
    parser.add_argument("--requests", type=int, default=36, help="of each round")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    started, num_deaths, seed = time.perf_counter(), 0, arguments.seed
    while num_deaths < arguments.deaths:
        found, num_swaps = asyncio.run(run(arguments.requests, 4, seed))
        num_deaths, seed = num_deaths + found, seed + 1
        print(f"round {seed}: {found} deaths, {num_swaps} swaps, the same tokens and logprobs", flush=True)
    print(f"{num_deaths} deaths in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
