"""Synthetic workloads with random arrivals. Lengths are lognormal (sigma 0.85) with the means of the paper's two data
sets (§6.1, Fig. 11), cut to 512 tokens in and 1,536 out. `translation`: every prompt begins with the same examples
(§6.4). `chat`: the prompt is the last 1,024 tokens of the conversation (§6.5)."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist

from quire.errors import UserError, nearest_name
from quire.simulator.trace import TraceRequest

SIGMA = 0.85
LONGEST_INPUT = 512
LONGEST_OUTPUT = 1536
LONGEST_CHAT = 1024
"""Longest prompt and answer of `chat`, in tokens, as in the paper."""
NUM_SHUFFLES = 200
TABLE = 2048
"""Equally likely lengths that a stream draws from."""
ONE_SHOT, FIVE_SHOT = 80, 341
"""Tokens of the shared prefix of `translation`, in the paper."""
SENTENCE = 28.0
"""Mean tokens of a sentence and of its translation (about WMT16's)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Mean input and output tokens of requests."""

    name: str
    mean_input: float
    mean_output: float


ALPACA = Shape("Alpaca", 19.31, 58.45)
SHAREGPT = Shape("ShareGPT", 161.31, 337.99)


# -- lengths -------------------------------------------------------------------------------------------------------


def lengths(mean: float, count: int, longest: int) -> list[int]:
    """`count` integers from 1 to `longest`, rising: quantiles of a lognormal with this mean (up to rounding)."""
    quantiles = [math.exp(SIGMA * NormalDist().inv_cdf((index + 0.5) / count)) for index in range(count)]
    low, high = 0.0, float(longest)
    for _ in range(40):
        median = (low + high) / 2
        found = [min(longest, max(1, round(median * quantile))) for quantile in quantiles]
        low, high = (median, high) if sum(found) < mean * count else (low, median)
    return found


def uncorrelated(inputs: list[int], outputs: list[int], rng: random.Random) -> list[tuple[int, int]]:
    """Pairs (input, output) of lengths in tokens, at random: the least correlated of NUM_SHUFFLES pairings, in random
    order."""
    expected = sum(inputs) * sum(outputs) / len(inputs)

    def shuffled() -> list[int]:
        return rng.sample(outputs, len(outputs))

    def covariance(paired: list[int]) -> float:
        return abs(sum(map(int.__mul__, inputs, paired)) - expected)

    best = min((shuffled() for _ in range(NUM_SHUFFLES)), key=covariance)
    pairs = list(zip(inputs, best, strict=True))
    rng.shuffle(pairs)
    return pairs


@cache
def _table(mean: float, longest: int) -> tuple[int, ...]:
    return tuple(lengths(mean, TABLE, longest))


# -- streams -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrivals:
    """Times of arrivals. rate: requests per second; `inf`: all at once. burstiness: shape of the gamma distribution of
    the gaps; 1 is a Poisson process, below 1 burstier, above 1 more even. The stream ends after `duration` seconds or
    `num_requests`; one of them is required."""

    rate: float
    burstiness: float = 1.0
    duration: float | None = None
    num_requests: int | None = None

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise UserError(f"--rate must be above 0, not {self.rate:g}", param="rate")
        if not 0 < self.burstiness < math.inf:
            raise UserError(f"--burstiness must be a positive number, not {self.burstiness:g}", param="burstiness")
        if self.duration is None and self.num_requests is None:
            raise UserError("give --duration or --num-requests: a workload must end", param="duration")
        if math.isinf(self.rate) and self.num_requests is None:
            raise UserError("--rate inf needs --num-requests", param="num_requests")
        for name, value in (("duration", self.duration), ("num_requests", self.num_requests)):
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"--{name.replace('_', '-')} must be above 0, not {value:g}", param=name)

    def times(self, rng: random.Random) -> Iterator[float]:
        """Seconds from the start to each arrival, not falling."""
        now = 0.0
        numbers = itertools.count() if self.num_requests is None else range(self.num_requests)
        for _ in numbers:
            if not math.isinf(self.rate):
                now += rng.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness))
            if self.duration is not None and now >= self.duration:
                return
            yield now


def stream(name: str, arrivals: Arrivals, seed: int = 0, *, n: int = 1, beam_width: int = 0) -> Iterator[TraceRequest]:
    """Requests of a workload in WORKLOADS, equal for equal arguments. Lengths and arrivals have generators of their
    own, so other rates keep the same requests. n, beam_width: the same for every request."""
    if name not in WORKLOADS:
        raise UserError(f"unknown workload {name!r}{nearest_name(name, WORKLOADS)} (known: {', '.join(WORKLOADS)})")
    source = WORKLOADS[name](random.Random(f"lengths {seed}"))
    times = arrivals.times(random.Random(f"arrivals {seed}"))
    for now, request in zip(times, source, strict=False):
        yield replace(request, arrival=now, n=n, beam_width=beam_width)


def _draw(table: tuple[int, ...], rng: random.Random) -> int:
    return table[int(rng.random() * TABLE)]


def _shaped(shape: Shape) -> Callable[[random.Random], Iterator[TraceRequest]]:
    def requests(rng: random.Random) -> Iterator[TraceRequest]:
        inputs, outputs = _table(shape.mean_input, LONGEST_INPUT), _table(shape.mean_output, LONGEST_OUTPUT)
        while True:
            yield TraceRequest(0.0, _draw(inputs, rng), _draw(outputs, rng))

    return requests


def _translation(num_shared: int) -> Callable[[random.Random], Iterator[TraceRequest]]:
    def requests(rng: random.Random) -> Iterator[TraceRequest]:
        table = _table(SENTENCE, LONGEST_INPUT)
        group = f"{num_shared} tokens of examples"
        while True:
            yield TraceRequest(0.0, num_shared + _draw(table, rng), _draw(table, rng), group, num_shared)

    return requests


def _chat(rng: random.Random) -> Iterator[TraceRequest]:
    inputs, outputs = _table(SHAREGPT.mean_input, LONGEST_INPUT), _table(SHAREGPT.mean_output, LONGEST_OUTPUT)
    while True:
        turn = rng.randint(1, 12)
        history = sum(_draw(inputs, rng) + _draw(outputs, rng) for _ in range(turn - 1))
        prompt = min(LONGEST_CHAT, history + _draw(inputs, rng))
        yield TraceRequest(0.0, prompt, min(LONGEST_CHAT, _draw(outputs, rng)))


WORKLOADS: Mapping[str, Callable[[random.Random], Iterator[TraceRequest]]] = {
    "sharegpt": _shaped(SHAREGPT),
    "alpaca": _shaped(ALPACA),
    "translation": _translation(FIVE_SHOT),
    "translation-1shot": _translation(ONE_SHOT),
    "chat": _chat,
}
"""Name -> endless requests (arrival 0), drawn from a generator."""
