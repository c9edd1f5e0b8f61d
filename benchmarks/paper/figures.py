"""Which runs the figures about sharing and waste consist of, and what the paper says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.paper.measure import Usage, beam_search, sampling
from quire.sampling_params import SamplingParams
from quire.simulator.workloads import ALPACA, SHAREGPT, Shape

WIDTHS = (2, 4, 6)


@dataclass(frozen=True, slots=True)
class Band:
    """What the paper reports, in percent: from `low` to `high`. printed: the number that is said of this very row,
    None where only the ends of a band are known."""

    low: float
    high: float
    printed: float | None

    def holds(self, percent: float) -> bool:
        """Whether a value lies inside, to the digit that the paper prints."""
        return self.distance(percent) == 0

    def distance(self, percent: float) -> float:
        """Percentage points to the nearer end from outside, signed; 0 inside."""
        rounded = round(percent, 1)
        return rounded - min(max(rounded, self.low), self.high)

    def __str__(self) -> str:
        if self.high == 100:
            return f"{self.printed}"
        return f"{self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class Row:
    """One number of a figure and how it is measured. value: of the run's usage, in percent."""

    figure: str
    quantity: str
    shape: Shape
    params: SamplingParams
    value: Callable[[Usage], float]
    band: Band

    @property
    def run_name(self) -> str:
        return f"{self.figure}-{self.quantity}"


def _saved(usage: Usage) -> float:
    return 100 * usage.saved


def _stored(usage: Usage) -> float:
    return 100 * usage.stored


_SHARING = (
    (ALPACA, "parallel sampling", sampling, (6.1, 9.8)),
    (ALPACA, "beam search", beam_search, (37.6, 55.2)),
    (SHAREGPT, "parallel sampling", sampling, (16.2, 30.5)),
    (SHAREGPT, "beam search", beam_search, (44.3, 66.3)),
)


def rows() -> list[Row]:
    """All rows, in the order in which they are printed."""
    found = [
        Row(
            "Fig. 2",
            f"token states, {SHAREGPT.name}, basic sampling",
            SHAREGPT,
            sampling(1),
            _stored,
            Band(96.0, 100.0, 96.3),
        )
    ]
    for shape, what, params, (low, high) in _SHARING:
        for width in WIDTHS:
            printed = {WIDTHS[0]: low, WIDTHS[-1]: high}.get(width)
            quantity = f"blocks saved, {shape.name}, {what} of {width}"
            found.append(Row("Fig. 15", quantity, shape, params(width), _saved, Band(low, high, printed)))
    return found
