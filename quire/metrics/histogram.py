"""A Prometheus histogram that costs a binary search per observation, however many tokens a step brings."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.metrics_core import HistogramMetricFamily


class Histogram:
    """name, help: as exposed. buckets: upper bounds, ascending, the last one (infinity) left out.

    Not synchronised: one thread observes and collects.
    """

    def __init__(self, name: str, help: str, buckets: Sequence[float]) -> None:
        self.name = name
        self.help = help
        self.buckets = tuple(buckets)
        self._counts = [0] * (len(self.buckets) + 1)
        self._sum = 0.0

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self._counts)

    @property
    def sum(self) -> float:
        """Of all observations."""
        return self._sum

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` into its bucket, `times` times."""
        self._counts[bisect_left(self.buckets, value)] += times
        self._sum += value * times

    def family(self, labels: dict[str, str]) -> HistogramMetricFamily:
        """The exposition with cumulative counts."""
        family = HistogramMetricFamily(self.name, self.help, labels=list(labels))
        cumulative, rows = 0, []
        for bound, count in zip((*map(_bound, self.buckets), "+Inf"), self._counts, strict=True):
            cumulative += count
            rows.append((bound, cumulative))
        family.add_metric(list(labels.values()), buckets=rows, sum_value=self._sum)
        return family


def one_two_five(low: float, high: float) -> tuple[float, ...]:
    """1, 2, 5 in each power of ten, from the first that is >= `low` to the first that is >= `high`."""
    bounds: list[float] = []
    exponent = -6
    while True:
        for digit in (1, 2, 5):
            bound = float(f"{digit}e{exponent}")
            if bound >= low:
                bounds.append(bound)
            if bound >= high:
                return tuple(bounds)
        exponent += 1


def _bound(value: float) -> str:
    return repr(float(value))
