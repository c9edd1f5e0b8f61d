"""How the driver of a comparison talks to an engine in a process of its own: a line of JSON each way.

Imports the standard library alone: each engine has its own packages. Libraries print what they like, so answers go to a
copy of the standard output that nothing else knows, and everything that is printed goes to the standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from benchmarks.gpu.workloads import random_prompts

Generate = Callable[[list[list[int]], list[int]], list[int]]
"""(prompts, how many tokens each gets) -> how many each got."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """num_slots: tokens of the KV cache, None where the engine does not say."""

    name: str
    version: str
    num_slots: int | None


def private_output() -> TextIO:
    """For answers alone; from now on what is printed goes to the standard error."""
    sys.stdout.flush()
    own = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return own


def serve(
    facts: EngineFacts, vocab_size: int, generate: Generate, requests: TextIO, answers: TextIO, began: float
) -> None:
    """Answer until the requests end. began: of time.perf_counter(), when the engine began to start."""
    _send(answers, {"ready": facts.name, "version": facts.version, "num_slots": facts.num_slots, **_since(began)})
    for line in requests:
        request = json.loads(line)
        try:
            _send(answers, _run(request, vocab_size, generate))
        except Exception as error:
            _send(answers, {"error": f"{type(error).__name__}: {str(error)[:500]}"})


def _run(request: dict[str, Any], vocab_size: int, generate: Generate) -> dict[str, Any]:
    prompts = random_prompts(request["input_lens"], vocab_size, request["seed"])
    began = time.perf_counter()
    counts = generate(prompts, request["output_lens"])
    taken = _since(began)
    if counts != request["output_lens"]:
        raise RuntimeError(f"{sum(counts)} tokens came out instead of {sum(request['output_lens'])}")
    return {"output_tokens": sum(counts), **taken}


def _since(began: float) -> dict[str, float]:
    return {"seconds": time.perf_counter() - began}


def _send(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def request(input_lens: Sequence[int], output_lens: Sequence[int], seed: int) -> str:
    """A line."""
    return json.dumps({"input_lens": list(input_lens), "output_lens": list(output_lens), "seed": seed}) + "\n"
