"""Requests of known lengths with random tokens. Imports the standard library alone, since other engines run it too."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """`num_requests` requests at once, each with `input_len` tokens in and `output_len` out."""

    num_requests: int
    input_len: int
    output_len: int

    def __str__(self) -> str:
        return f"{self.num_requests} x {self.input_len} in, {self.output_len} out"

    @property
    def input_lens(self) -> list[int]:
        return [self.input_len] * self.num_requests

    @property
    def output_lens(self) -> list[int]:
        return [self.output_len] * self.num_requests

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """No two share a prefix worth mentioning, nor do those of two seeds."""
        return random_prompts(self.input_lens, vocab_size, seed)


@dataclass(frozen=True, slots=True)
class RaggedWorkload:
    """Requests at once with lognormal lengths, cut at limits, the same for the same number of requests."""

    num_requests: int
    most_input: int = 8000
    most_output: int = 1500

    def __str__(self) -> str:
        return f"{self.num_requests} ragged"

    @property
    def input_lens(self) -> list[int]:
        rng = random.Random(7)
        return [min(self.most_input, max(16, int(rng.lognormvariate(5.5, 1.3)))) for _ in range(self.num_requests)]

    @property
    def output_lens(self) -> list[int]:
        rng = random.Random(8)
        return [min(self.most_output, max(8, int(rng.lognormvariate(5.0, 0.8)))) for _ in range(self.num_requests)]

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        return random_prompts(self.input_lens, vocab_size, seed)


Work = Workload | RaggedWorkload


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


RAGGED_WORK = RaggedWorkload(128)
TINY_WORK = Workload(2, 5, 4)
"""For trying things out without a card."""
TINY_RAGGED = RaggedWorkload(2, 9, 5)
