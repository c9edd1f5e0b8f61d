"""What each rank of tests/executors/test_launched.py runs: mixed requests through LLM, and what came of them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from quire import LLM, SamplingParams
from quire.errors import QuireError
from quire.executors.launched import LaunchedRank
from quire.step import StepPlan

PREEMPTED = {"num_blocks_override": 24, "max_num_seqs": 16, "max_num_batched_tokens": 64}


def make_requests(count: int) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """A third begin alike; half are greedy; some have several completions."""
    rng, prompts, params = random.Random(3), [], []
    for number in range(count):
        prompt = [rng.randrange(97) for _ in range(rng.randrange(1, 40))]
        prompts.append({"prompt_token_ids": [7] * 20 + prompt if number % 3 == 0 else prompt})
        params.append(
            SamplingParams(
                max_tokens=rng.randrange(1, 12),
                temperature=rng.choice((0.0, 1.0)),
                n=rng.choice((1, 1, 1, 3)),
                ignore_eos=True,
                detokenize=False,
            )
        )
    return prompts, params


def main(model: str, directory: str, size: str, num_requests: int, slow_rank: int, unlike_rank: int) -> None:
    """directory: of a file for each rank. size: option that is 2. slow_rank: takes its time over some steps.
    unlike_rank: gives its engine another request. -1: none."""
    rank = int(os.environ["RANK"])
    written = Path(directory) / f"{rank}.json"
    plans: list[str] = []
    begin, encode = LaunchedRank.execute, msgspec.msgpack.Encoder().encode

    def execute(self: LaunchedRank, plan: StepPlan) -> Any:
        plans.append(hashlib.sha256(encode(plan)).hexdigest())
        if rank == slow_rank and plan.step_id % 7 == 0:
            time.sleep(0.01)
        return begin(self, plan)

    LaunchedRank.execute = execute  # type: ignore[method-assign]
    llm = LLM(
        model,
        **{size: 2},
        distributed_executor_backend="external_launcher",
        skip_tokenizer_init=True,
        num_threads=1,
        scheduling_policy="priority",
        **PREEMPTED,
    )
    prompts, params = make_requests(num_requests)
    if rank == unlike_rank:
        prompts[0] = {"prompt_token_ids": [1, 2]}
    try:
        outputs = llm.generate(prompts, params, priority=[number % 4 for number in range(num_requests)], use_tqdm=False)
    except QuireError as error:
        written.write_text(json.dumps({"error": str(error)}))
        os._exit(0)  # the other rank may wait for this one
    tokens = [[list(each.token_ids) for each in output.outputs] for output in outputs]
    stats = llm.stats()
    written.write_text(json.dumps({"plans": plans, "tokens": tokens, "preemptions": stats["preemptions_total"]}))


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
