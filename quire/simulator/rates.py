from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from quire.errors import QuireError, UserError
from quire.simulator.metrics import Metrics

PRECISION = 0.02
LOWEST_RATE = 1e-4
HIGHEST_RATE = 1e6


class UnboundedRateError(QuireError):
    """Error of `find_rate` where every rate keeps the objectives."""


@dataclass(frozen=True)
class Trial:
    rate: float
    holds: bool
    metrics: Metrics


@dataclass(frozen=True)
class FoundRate:
    """rate: highest requests per second that held; the next one tried, at most PRECISION higher, did not."""

    rate: float
    metrics: Metrics
    trials: tuple[Trial, ...]


def find_rate(
    run: Callable[[float], Metrics],
    holds: Callable[[Metrics], bool],
    *,
    start: float = 1.0,
    precision: float = PRECISION,
) -> FoundRate:
    """Double (or halve) the rate from `start` until it no longer holds (or does), then halve the interval.

    Raises QuireError when no rate holds, UnboundedRateError when every one does.
    """
    if not 0 < start < math.inf:
        raise UserError(f"the search must begin at a rate above 0 and finite, not {start:g}", param="rate")
    trials: list[Trial] = []

    def attempt(rate: float) -> bool:
        metrics = run(rate)
        trials.append(Trial(rate, holds(metrics), metrics))
        return trials[-1].holds

    low = high = start
    if attempt(start):
        while trials[-1].holds:
            low, high = high, 2 * high
            if high > HIGHEST_RATE:
                raise UnboundedRateError(f"every rate up to {low:g} requests/s keeps the objectives: they do not bind")
            attempt(high)
    else:
        while not trials[-1].holds:
            if not trials[-1].metrics.num_requests:
                raise QuireError(
                    f"no request arrives at {low:.2g} requests/s in the time that is simulated: take a longer duration"
                )
            low, high = low / 2, low
            if low < LOWEST_RATE:
                raise QuireError(f"not even {high:.2g} requests/s keep the objectives")
            attempt(low)
    while high / low > 1 + precision:
        middle = (low * high) ** 0.5
        if attempt(middle):
            low = middle
        else:
            high = middle
    best = next(trial for trial in trials if trial.rate == low)
    return FoundRate(low, best.metrics, tuple(trials))
