"""Requests of fixed lengths with random tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """So many requests at once, each with `input_len` tokens in and `output_len` out."""

    num_requests: int
    input_len: int
    output_len: int

    def __str__(self) -> str:
        return f"{self.num_requests} x {self.input_len} in, {self.output_len} out"

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """No two share a prefix worth mentioning, nor do those of two seeds."""
        rng = random.Random(seed)
        return [[rng.randrange(vocab_size) for _ in range(self.input_len)] for _ in range(self.num_requests)]


PEER_WORK = Workload(64, 256, 128)
"""Also Transformers' (benchmarks/gpu/transformers_peer.py)."""
BATCH_WORK = Workload(256, 1024, 1024)
SINGLE_WORK = Workload(1, 128, 256)
TINY_WORK = Workload(2, 5, 4)
"""For trying things out without a card."""
