"""What engines are asked to compute, and how fast they were at it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Request = dict[str, Any]
FIRST_TOKEN_ID, NUM_TOKEN_IDS = 3, 15_997
"""Prompts consist of ids in this range, which lies inside every model's vocabulary and holds no special token."""
TRIAL_REQUESTS, TRIAL_INPUT, TRIAL_OUTPUT = 16, 1_024, 12


@dataclass(frozen=True)
class Workload:
    """What is run, and which part of it counts. part: "all", "prefill" or "decode"."""

    name: str
    requests: tuple[Request, ...]
    part: str

    @property
    def unit(self) -> str:
        one_token_each = all(request["max_tokens"] == 1 for request in self.requests)
        return "input tok/s" if self.part == "prefill" or one_token_each else "output tok/s"

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(len(request["prompt_token_ids"]) + request["max_tokens"] for request in self.requests)

    @property
    def num_tokens(self) -> int:
        """Of all requests together, prompts and outputs."""
        return sum(len(request["prompt_token_ids"]) + request["max_tokens"] for request in self.requests)

    def trial(self) -> Workload:
        """A short form of the same kind, which tells the fast setting of an engine from the slow one."""
        requests = [
            {
                "prompt_token_ids": request["prompt_token_ids"][:TRIAL_INPUT],
                "max_tokens": min(TRIAL_OUTPUT, request["max_tokens"]),
            }
            for request in self.requests[:TRIAL_REQUESTS]
        ]
        return Workload(self.name, tuple(requests), self.part)


def parse_workload(text: str, named: dict[str, list[Request]]) -> Workload:
    """Raises ValueError for what is neither a name nor a shape."""
    name, _, part = text.partition(":")
    if part not in ("", "prefill", "decode"):
        raise ValueError(f"{text}: the part is prefill or decode, not {part}")
    if name in named:
        requests = named[name]
    elif shape := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)/([1-9]\d*)", name):
        requests = random_requests(*map(int, shape.groups()))
    else:
        raise ValueError(f"no workload is called {name}; there are {', '.join(named)}, and NxINPUT/OUTPUT")
    if part == "decode" and all(request["max_tokens"] == 1 for request in requests):
        raise ValueError(f"{text}: one token each leaves nothing to decode")
    return Workload(text, tuple(requests), part or "all")


def random_requests(count: int, input_len: int, output_len: int) -> list[Request]:
    """Prompts that share no prefix; the same at each call."""
    return [
        {
            "prompt_token_ids": [(row * 7_919 + column * 104_729) % NUM_TOKEN_IDS for column in range(input_len)],
            "max_tokens": output_len,
        }
        for row in range(count)
    ]


def shifted(requests: Sequence[Request], run: int, max_tokens: int | None = None) -> list[Request]:
    """The requests of run number `run`: equal ids stay equal, and none is what it was in another run.

    max_tokens: instead of what each request says.
    """
    return [
        {
            "prompt_token_ids": [
                FIRST_TOKEN_ID + (token + run * 31) % NUM_TOKEN_IDS for token in request["prompt_token_ids"]
            ],
            "max_tokens": max_tokens or request["max_tokens"],
        }
        for request in requests
    ]


def speed(workload: Workload, measure: Callable[[Sequence[Request], int | None], dict[str, float]]) -> float:
    """Tokens per second of the part of `workload` that counts.

    measure: (requests, max_tokens instead of their own) -> seconds, input_tokens and output_tokens.
    """
    if workload.part == "all":
        result = measure(workload.requests, None)
        return result["output_tokens" if workload.unit == "output tok/s" else "input_tokens"] / result["seconds"]
    prefill = measure(workload.requests, 1)
    if workload.part == "prefill":
        return prefill["input_tokens"] / prefill["seconds"]
    whole = measure(workload.requests, None)
    return (whole["output_tokens"] - prefill["output_tokens"]) / (whole["seconds"] - prefill["seconds"])
