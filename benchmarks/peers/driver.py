"""What the processes of all engines have in common: load once, then run lists of requests, one line each.

It runs inside a peer's environment, so it imports the standard library alone.

    arguments   --model PATH --threads N [--options '{"name": value}']
    prints      {"version": "..."} once the engine is loaded
    reads       {"requests": [{"prompt_token_ids": [...], "max_tokens": N}, ...]}
    prints      {"seconds": S, "input_tokens": N, "output_tokens": N} after each run
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Request = dict[str, Any]
Run = Callable[[], list[int]]
"""Computes every request, greedy and past any end-of-sequence; returns how many tokens each was given."""
Prepare = Callable[[list[Request]], Run]
"""Does for some requests what the clock does not count: objects of the engine's own types, no computing."""
Load = Callable[[str, int, dict[str, Any]], tuple[Prepare, str]]
"""(model path, threads, options) -> (prepare, version of the engine)."""


def serve(load: Load) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--options", type=json.loads, default={})
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints must not stand between the answers
    prepare, version = load(arguments.model, arguments.threads, arguments.options)
    print(json.dumps({"version": version}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(prepare, json.loads(line)["requests"])), file=answers, flush=True)


def measure(prepare: Prepare, requests: list[Request]) -> dict[str, float]:
    """Raises RuntimeError when the engine gave a request other than the tokens it asked for."""
    run = prepare(requests)
    started = time.perf_counter()
    num_tokens = run()
    seconds = time.perf_counter() - started
    wanted = [request["max_tokens"] for request in requests]
    if num_tokens != wanted:
        raise RuntimeError(f"asked for {wanted} tokens, got {num_tokens}")
    return {
        "seconds": seconds,
        "input_tokens": sum(len(request["prompt_token_ids"]) for request in requests),
        "output_tokens": sum(wanted),
    }
