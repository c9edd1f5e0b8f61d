from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist
from typing import Any, Protocol

from quire.errors import UserError

Pairs = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Jitter:
    """Variation of step times. single, chunks: distribution of measured over expected step time as (level, ratio),
    levels rising to 1: between the level before and this one the mean ratio is `ratio`; empty: always 1. lasting:
    (seconds, share) of the scatter that fades over that time (to 1/e). stalls: (length in seconds, number per second of
    work on single tokens), added on top."""

    single: Pairs = ()
    chunks: Pairs = ()
    lasting: Pairs = ()
    stalls: Pairs = ()

    def __post_init__(self) -> None:
        """Raises UserError for an invalid distribution, or shares above 1."""
        for name, table in (("single", self.single), ("chunks", self.chunks)):
            levels = [level for level, _ in table]
            is_rising = all(low < high for low, high in zip([0.0, *levels], levels, strict=False))
            if table and not (is_rising and levels[-1] == 1 and all(ratio > 0 for _, ratio in table)):
                raise UserError(f"the jitter of {name} must have levels that rise to 1, and ratios above 0", param=name)
        shares = [share for _, share in self.lasting]
        if any(seconds <= 0 for seconds, _ in self.lasting) or min(shares, default=0) < 0 or sum(shares) > 1 + 1e-9:
            raise UserError(
                "the jitter's lasting needs seconds above 0, and shares of at most 1 in all", param="lasting"
            )
        if any(seconds < 0 or rate < 0 for seconds, rate in self.stalls):
            raise UserError("the jitter's stalls must have seconds and rates of at least 0", param="stalls")

    def __bool__(self) -> bool:
        return bool(self.single or self.chunks or self.stalls)

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Jitter:
        """Read a profile's jitter. Raises UserError or TypeError for a wrong entry of a profile."""
        return cls(**{name: tuple((float(at), float(value)) for at, value in pairs) for name, pairs in entry.items()})


class Scatter(Protocol):
    """Model of step times' variation, asked for each step."""

    def seconds(self, now: float, expected: float, has_chunks: bool) -> float:
        """Seconds of the step that begins now; `now` never falls. has_chunks: a sequence computes more than one
        token."""
        ...


class NoScatter:
    def seconds(self, now: float, expected: float, has_chunks: bool) -> float:
        return expected


class DrawnScatter:
    """Draws ratios: a normal variable, the sum of parts that fade, mapped through the step kind's distribution."""

    def __init__(self, jitter: Jitter, seed: int) -> None:
        """Equal seeds give equal draws for steps at the same moments."""
        self._random = random.Random(f"jitter {seed}")
        self._tables = [_Table(jitter.single), _Table(jitter.chunks)]
        self._parts = [(seconds, math.sqrt(share)) for seconds, share in jitter.lasting if share]
        self._fresh = math.sqrt(max(0.0, 1.0 - sum(share for _, share in jitter.lasting)))
        self._state = [self._random.gauss() for _ in self._parts]
        self._then = 0.0
        self._stalls = [seconds for seconds, _ in jitter.stalls]
        self._rates = list(accumulate(rate for _, rate in jitter.stalls))

    def seconds(self, now: float, expected: float, has_chunks: bool) -> float:
        taken = expected * self._ratio(now, has_chunks)
        return taken if has_chunks else taken + self._stalled(expected)

    def _stalled(self, expected: float) -> float:
        if not self._rates:
            return 0.0
        drawn = self._random.random() / max(expected, 1e-12)
        return self._stalls[bisect_left(self._rates, drawn)] if drawn < self._rates[-1] else 0.0

    def _ratio(self, now: float, has_chunks: bool) -> float:
        gauss, state = self._random.gauss, self._state
        passed, self._then = now - self._then, now
        z = self._fresh * gauss()
        for index, (seconds, size) in enumerate(self._parts):
            kept = math.exp(-passed / seconds)
            state[index] = kept * state[index] + math.sqrt(1.0 - kept * kept) * gauss()
            z += size * state[index]
        return self._tables[has_chunks].at(z)


class _Table:
    """Distribution of ratios as a function of a normal variable."""

    def __init__(self, pairs: Pairs) -> None:
        self._ends = [NormalDist().inv_cdf(level) for level, _ in pairs[:-1]]
        self._ratios: Sequence[float] = [ratio for _, ratio in pairs] or [1.0]

    def at(self, z: float) -> float:
        return self._ratios[bisect_left(self._ends, z)]


def make_scatter(jitter: Jitter, seed: int) -> Scatter:
    return DrawnScatter(jitter, seed) if jitter else NoScatter()
