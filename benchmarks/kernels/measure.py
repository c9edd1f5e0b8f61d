"""Timing of alternatives in turns, so that whatever else the machine does meets all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from quire.clock import Clock

Runner = Callable[[], int]
"""Computes once or several times, and returns how many units of work that was (calls, bytes, operations)."""

LONG_RUN_SECONDS = 0.05
"""A run of this length is not preceded by another that wakes the threads: what they lose does not show."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds a unit of work, of each round."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.samples)

    @property
    def spread(self) -> float:
        """Distance of the quartiles, as a share of the median: how far apart rounds were."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / self.median


@dataclass(frozen=True, slots=True)
class Method:
    """How long and how often. sample_seconds: a sample repeats its runner for this long at least. pause: called
    before each sample, until the threads of the one before are asleep. min_rounds are made whatever they take,
    further ones, up to max_rounds, while the case is within its time."""

    clock: Clock
    pause: Callable[[], None]
    sample_seconds: float = 0.004
    min_rounds: int = 3
    max_rounds: int = 15

    def measure(self, runners: Mapping[str, Runner], seconds: float) -> dict[str, Timing]:
        """Every runner once a round; each round begins with another one. seconds: the time that the case has."""
        names = list(runners)
        samples: dict[str, list[float]] = {name: [] for name in names}
        deadline = self.clock.now() + seconds
        # The first call of anything allocates, compiles or touches memory for the first time.
        durations = {name: self._run(runner)[1] for name, runner in runners.items()}
        for round_number in range(self.max_rounds):
            if round_number >= self.min_rounds and self.clock.now() >= deadline:
                break
            for name in _rotated(names, round_number):
                self.pause()
                if durations[name] < LONG_RUN_SECONDS:
                    runners[name]()
                samples[name].append(self._sample(runners[name]))
        return {name: Timing(tuple(taken)) for name, taken in samples.items()}

    def _sample(self, runner: Runner) -> float:
        units, seconds = 0, 0.0
        while units == 0 or seconds < self.sample_seconds:
            more, taken = self._run(runner)
            units += more
            seconds += taken
        return seconds / units

    def _run(self, runner: Runner) -> tuple[int, float]:
        started = self.clock.now()
        units = runner()
        return units, self.clock.now() - started


def _rotated(names: Sequence[str], by: int) -> list[str]:
    first = by % len(names)
    return [*names[first:], *names[:first]]
