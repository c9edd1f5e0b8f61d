"""Requests whose lengths are shaped like those of the paper's two data sets (§6.1, Fig. 11). No data set is shipped.

The paper gives the means. Both data sets are heavy-tailed; here every length is lognormal with the same shape, sigma 1
(the mean is 1.65 times the median, and one in twenty is longer than three means), cut to what fits the paper's models
and this one: 1,024 tokens in, 1,024 out. Its location is set so that the mean after the cut is the paper's.

A run of minutes holds few requests, so chance is kept out of their lengths as far as possible: they are the quantiles
in the middle of as many equally likely ranges, and inputs meet outputs as uncorrelated as some shuffles allow. A small
workload then has the shape of a large one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

SIGMA = 1.0
LONGEST = 1024
NUM_SHUFFLES = 200


@dataclass(frozen=True, slots=True)
class Shape:
    """A data set in two numbers: mean tokens of the input and of the output."""

    name: str
    mean_input: float
    mean_output: float


ALPACA = Shape("Alpaca", 19.31, 58.45)
SHAREGPT = Shape("ShareGPT", 161.31, 337.99)


@dataclass(frozen=True, slots=True)
class PaperRequest:
    """One request: its prompt, and how many tokens every sequence of it generates."""

    token_ids: list[int]
    output_len: int


def lengths(mean: float, count: int) -> list[int]:
    """`count` whole numbers from 1 to LONGEST, rising: quantiles of a lognormal with this mean (up to rounding)."""
    quantiles = [math.exp(SIGMA * NormalDist().inv_cdf((index + 0.5) / count)) for index in range(count)]
    low, high = 0.0, float(LONGEST)
    for _ in range(60):
        median = (low + high) / 2
        found = [min(LONGEST, max(1, round(median * quantile))) for quantile in quantiles]
        low, high = (median, high) if sum(found) < mean * count else (low, median)
    return found


def uncorrelated(inputs: list[int], outputs: list[int], rng: random.Random) -> list[tuple[int, int]]:
    """Pairs in random order: of NUM_SHUFFLES random pairings the one with the least correlation."""
    expected = sum(inputs) * sum(outputs) / len(inputs)

    def shuffled() -> list[int]:
        return rng.sample(outputs, len(outputs))

    def covariance(paired: list[int]) -> float:
        return abs(sum(map(int.__mul__, inputs, paired)) - expected)

    best = min((shuffled() for _ in range(NUM_SHUFFLES)), key=covariance)
    pairs = list(zip(inputs, best, strict=True))
    rng.shuffle(pairs)
    return pairs


def draw(shape: Shape, count: int, text: Sequence[int], seed: int) -> list[PaperRequest]:
    """`count` requests of a shape. text: tokens that prompts are cut from, at random places; LONGEST at least."""
    rng = random.Random(seed)
    requests = []
    for input_len, output_len in uncorrelated(lengths(shape.mean_input, count), lengths(shape.mean_output, count), rng):
        start = rng.randrange(len(text) - input_len + 1)
        requests.append(PaperRequest(list(text[start : start + input_len]), output_len))
    return requests
