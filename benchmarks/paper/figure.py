"""What a figure of the paper is made of: the trials it needs, the numbers that come of them, and its plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from benchmarks.paper.kernel_timing import KernelTiming
from benchmarks.paper.trials import Curve, Rates, Usage, Window

Trial = Window | Curve | KernelTiming
TOLERANCE = 0.2
"""Of a ratio or a size, relative to the paper's."""
TOLERANCE_POINTS = 3.0
"""Of a share of memory, in percentage points."""


@dataclass(frozen=True)
class Row:
    """One number of the paper beside ours. why: what makes the difference, in a few words, where there is a known one.
    unit: "%" for shares, which are compared by their difference; anything else by the ratio. at_most: the paper's
    number is a limit, or a cost; less is as good."""

    figure: str
    quantity: str
    ours: float
    paper: float
    unit: str = "x"
    why: str = ""
    at_most: bool = False

    @property
    def ratio(self) -> float:
        return self.ours / self.paper

    @property
    def is_near(self) -> bool:
        if self.unit == "%" and abs(self.ours - self.paper) <= TOLERANCE_POINTS:
            return True
        return (0 if self.at_most else 1 - TOLERANCE) <= self.ratio <= 1 + TOLERANCE or (
            self.at_most and self.ours <= self.paper
        )


@dataclass(frozen=True)
class Scale:
    """How long trials are. seconds: of arrivals in a curve, by workload; window: requests of a window, by workload."""

    seconds: Mapping[str, float]
    window: Mapping[str, int]
    fractions: tuple[float, ...]
    """Rates of the curves of Fig. 12, relative to the throughput of a full queue."""


FULL = Scale(
    MappingProxyType(
        {"sharegpt": 600.0, "alpaca": 120.0, "translation": 120.0, "translation-1shot": 120.0, "chat": 600.0}
    ),
    MappingProxyType({"sharegpt": 2400, "alpaca": 6000}),
    (0.7, 0.9, 1.0, 1.1),
)
QUICK = Scale(
    MappingProxyType({"sharegpt": 40.0, "alpaca": 6.0, "translation": 6.0, "translation-1shot": 6.0, "chat": 40.0}),
    MappingProxyType({"sharegpt": 100, "alpaca": 200}),
    (0.7, 1.0),
)


class Results:
    """What trials found."""

    def __init__(self, found: Mapping[Trial, Any]) -> None:
        self._found = found

    def usage(self, trial: Window) -> Usage:
        found = self._found[trial]
        assert isinstance(found, Usage)
        return found

    def rates(self, trial: Curve) -> Rates:
        found = self._found[trial]
        assert isinstance(found, Rates)
        return found

    def slowdown(self, trial: KernelTiming) -> float:
        found = self._found[trial]
        assert isinstance(found, float)
        return found

    def sustained(self, trial: Curve) -> float:
        return self.rates(trial).sustained


def _no_trials(scale: Scale) -> Sequence[Trial]:
    return ()


@dataclass(frozen=True)
class Figure:
    """trials: what has to be run for the table. rows: the table. plot: draws into a matplotlib figure, and says how
    large: None where a table says it all. drawn: what has to be run besides for the plot."""

    name: str
    title: str
    rows: Callable[[Results, Scale], list[Row]]
    trials: Callable[[Scale], Sequence[Trial]] = _no_trials
    plot: Callable[[Any, Results, Scale], None] | None = None
    drawn: Callable[[Scale], Sequence[Trial]] = _no_trials
    remark: str = ""
    """Said under the table."""


def worst_and_best(values: Sequence[float]) -> tuple[float, float]:
    """(smallest, largest), those that are not numbers left out."""
    numbers = [value for value in values if not math.isnan(value)]
    return min(numbers), max(numbers)
