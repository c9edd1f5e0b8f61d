"""Real models whose engines are killed: every request ends with the tokens and logprobs of an undisturbed run.

The long form (`make soak-restart`) kills many times: `python -m tests.e2e.test_restart --deaths 50`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire import AsyncLLM, SamplingParams
from quire.config.options import EngineOptions
from quire.engine.fleet import Fleet
from quire.engine.process_client import ProcessClient
from quire.outputs import RequestOutput
from quire.parsers.reasoning import ThinkFormat
from quire.utils.heartbeat import SILENCE_LIMIT
from tests.fakes.fates import Fates
from tests.long import all_but_long
from tests.models.conftest import SavedModel
from tests.processes import has_ended

GUARD_SECONDS = 300
"""Against a test that hangs; nothing here takes so long."""
TEXT = "def read(path):\n    with open(path) as file:\n        return [line.split() for line in file]\n\n\ndef "
OPTIONS: dict[str, Any] = {
    "num_blocks_override": 22,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 96,
    "preemption_mode": "swap",
    "swap_space": "16MiB",
    "num_threads": 1,
}
"""A pool that the requests do not fit into together: they preempt and swap one another."""
KINDS: list[dict[str, Any]] = [
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
    {"temperature": 0.9, "max_tokens": 40, "thinking_token_budget": 9},
]
IDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 24, "logprobs": 1},
    {"temperature": 20.0, "max_tokens": 16, "n": 3, "logprobs": 0},
    {"temperature": 0.0, "max_tokens": 8, "n": 2, "use_beam_search": True},
]
"""For models without a tokenizer."""


def text_request(number: int) -> tuple[str, dict[str, Any]]:
    return TEXT[: 20 + number % 60], KINDS[number % len(KINDS)]


def ids_request(number: int) -> tuple[list[int], dict[str, Any]]:
    rng = random.Random(number)
    return [rng.randrange(97) for _ in range(10 + 23 * (number % 5))], {"detokenize": False, **IDS[number % len(IDS)]}


Make = Callable[[int], tuple[Any, dict[str, Any]]]


async def think(engine: AsyncLLM) -> None:
    """Let the engine take what its model writes for thoughts, up to `</think>`."""
    _ = await asyncio.to_thread(lambda: engine.ready)
    engine.input_processor.reasoning = ThinkFormat(is_open=True)


async def ask(engine: AsyncLLM, number: int, make: Make) -> tuple[list[Any], object]:
    """What the caller of request `number` gets."""
    prompt, fields = make(number)
    last: RequestOutput | None = None
    async for output in engine.generate(prompt, SamplingParams(seed=number, **fields)):
        last = output
    assert last is not None
    assert last.finished
    completions = [
        (c.index, c.text, c.token_ids, c.logprobs, c.cumulative_logprob, c.finish_reason, c.stop_reason, c.score)
        for c in last.outputs
    ]
    return completions, last.prompt_logprobs


async def ask_all(engine: AsyncLLM, num_requests: int, make: Make) -> list[object]:
    return await asyncio.gather(*(ask(engine, number, make) for number in range(num_requests)))


def open_engine(options: dict[str, Any]) -> AsyncLLM:
    return AsyncLLM.from_options(
        EngineOptions.from_keywords(options),
        restart_engine=True,
        hung_engine_timeout=SILENCE_LIMIT,
        executor="tests.fakes.fates:fated",
    )


async def compare(
    engine: AsyncLLM, fates: Fates, planned: list[tuple[str, int]], num_requests: int, make: Make = text_request
) -> int:
    """Run the requests twice, the second time while engines meet their fates. Returns how many swaps the first run
    took."""
    undisturbed = await ask_all(engine, num_requests, make)
    num_swaps = (await engine.stats()).swap_preemptions_total
    num_restarts = engine.num_restarts
    fates.are(*planned)
    disturbed = await ask_all(engine, num_requests, make)
    for number, (before, after) in enumerate(zip(undisturbed, disturbed, strict=True)):
        assert before == after, f"request {number}"
    assert fates.num_left == 0
    assert engine.num_restarts == num_restarts + len(planned)
    stats = await engine.stats()
    assert (stats.num_used_blocks, stats.num_used_host_blocks) == (0, 0)
    return num_swaps


@pytest.fixture
def fates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fates:
    return Fates(tmp_path, monkeypatch)


@pytest.mark.parametrize("queue_depth", all_but_long([1, 2], [2]))
async def test_kill_9_under_load_changes_no_bit(fates: Fates, queue_depth: int) -> None:
    engine = open_engine({**OPTIONS, "queue_depth": queue_depth})
    try:
        async with asyncio.timeout(GUARD_SECONDS):
            await think(engine)
            num_swaps = await compare(engine, fates, [("die", 23)], 18)
            completions, _ = await ask(engine, len(KINDS) - 1, text_request)
        assert "</think>" in completions[0][1], "the thoughts are ended when their budget is used up"
        assert num_swaps > 0, "the requests are to be swapped as well"
    finally:
        engine.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("deaths", [[11], [5, 11]], ids=str)
async def test_the_states_of_a_hybrid_model_are_made_again(
    fates: Fates, saved_model: Callable[[str], SavedModel], deaths: list[int]
) -> None:
    options = {
        "model": str(saved_model("qwen3.5-small-states").directory),
        "skip_tokenizer_init": True,
        "num_blocks_override": 60,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "state_snapshot_interval": 64,
        "num_threads": 1,
    }
    engine = open_engine(options)
    try:
        async with asyncio.timeout(GUARD_SECONDS):
            await compare(engine, fates, [("die", step) for step in deaths], 9, ids_request)
    finally:
        engine.shutdown()


@pytest.mark.long
@pytest.mark.parametrize(
    "planned",
    [[("rank stops", 6)], [("die", 5), ("rank dies", 7)]],
    ids=lambda planned: ", ".join(kind for kind, _ in planned),
)
async def test_two_ranks_whose_engine_is_killed_or_of_which_one_stops_or_is_killed(
    fates: Fates, saved_model: Callable[[str], SavedModel], planned: list[tuple[str, int]]
) -> None:
    """A stopped process does not notice the end of its parent: it must be killed with it."""
    options = {
        "model": str(saved_model("qwen3").directory),
        "skip_tokenizer_init": True,
        "num_blocks_override": 40,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "tensor_parallel_size": 2,
        "num_threads": 1,
    }
    engine = open_engine(options)
    try:
        async with asyncio.timeout(GUARD_SECONDS):
            _ = await asyncio.to_thread(lambda: engine.ready)
            ranks = ranks_of(engine)
            await compare(engine, fates, planned, 6, ids_request)
        assert len(ranks) == 2
        assert all(has_ended(rank) for rank in ranks)
    finally:
        engine.shutdown()


def ranks_of(engine: AsyncLLM) -> list[psutil.Process]:
    client = engine._session.client
    assert isinstance(client, Fleet)
    process = client.members[0].client
    assert isinstance(process, ProcessClient)
    return psutil.Process(process.pid).children()


async def soak(fates: Fates, arguments: argparse.Namespace) -> None:
    started, num_deaths, rng = time.perf_counter(), 0, random.Random(arguments.seed)
    engine = open_engine(OPTIONS)
    await think(engine)
    while num_deaths < arguments.deaths:
        planned = [("die", rng.randrange(2, 20)) for _ in range(4)]
        num_swaps = await compare(engine, fates, planned, arguments.requests)
        num_deaths += len(planned)
        print(f"{num_deaths} deaths, {num_swaps} swaps, the same tokens and logprobs", flush=True)
    engine.shutdown()
    print(f"{num_deaths} deaths in {time.perf_counter() - started:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=50)
    parser.add_argument("--requests", type=int, default=36, help="of each round")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as path:
        asyncio.run(soak(Fates(Path(path), patch), arguments))


if __name__ == "__main__":
    main()
