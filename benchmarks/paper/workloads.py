"""The requests of a run on the real engine: lengths as the simulator has them, prompts cut from a text.

A run of minutes holds few requests, so chance is kept out of their lengths as far as possible: they are the quantiles
in the middle of as many equally likely ranges, and inputs meet outputs as uncorrelated as some shuffles allow. A small
workload then has the shape of a large one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from quire.simulator.workloads import LONGEST_INPUT, LONGEST_OUTPUT, Shape, lengths, uncorrelated


@dataclass(frozen=True, slots=True)
class PaperRequest:
    """One request: its prompt, and how many tokens every sequence of it generates."""

    token_ids: list[int]
    output_len: int


def draw(shape: Shape, count: int, text: Sequence[int], seed: int) -> list[PaperRequest]:
    """`count` requests of a shape. text: tokens that prompts are cut from, at random places; LONGEST_INPUT at least."""
    rng = random.Random(seed)
    requests = []
    inputs = lengths(shape.mean_input, count, LONGEST_INPUT)
    outputs = lengths(shape.mean_output, count, LONGEST_OUTPUT)
    for input_len, output_len in uncorrelated(inputs, outputs, rng):
        start = rng.randrange(len(text) - input_len + 1)
        requests.append(PaperRequest(list(text[start : start + input_len]), output_len))
    return requests
