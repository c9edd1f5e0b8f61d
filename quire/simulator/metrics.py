"""Metrics of a simulated run (docs/simulator.md), in bounded memory."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from quire.kv_cache.stats import EngineStats

EXACT = 100_000
"""Values that a distribution keeps exactly."""
BIN_WIDTH = math.log(1.005)
NUM_BINS = 1024
"""Bins of a time series beyond which neighbours are merged."""
PERCENTILES = (50.0, 90.0, 95.0, 99.0)
LATENCIES = ("ttft", "loading_ttft", "tpot", "latency", "normalized_latency")


class MergedDistribution:
    """Distribution of one latency in seconds, at least 0. Those of replicas can be merged."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.lowest = math.inf
        self.highest = 0.0
        self._values: array[float] | None = array("d")
        self._bins: Counter[int] = Counter()
        """Bin (of the value's logarithm) -> count, once there are too many values to keep."""

    def add_value(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.lowest = min(self.lowest, value)
        self.highest = max(self.highest, value)
        if self._values is None:
            self._bins[_bin(value)] += 1
            return
        self._values.append(value)
        if len(self._values) > EXACT:
            self._begin_bins()

    def merge(self, other: MergedDistribution) -> None:
        self.count += other.count
        self.total += other.total
        self.lowest, self.highest = min(self.lowest, other.lowest), max(self.highest, other.highest)
        if self._values is not None and other._values is not None:
            self._values.extend(other._values)
            if len(self._values) > EXACT:
                self._begin_bins()
            return
        self._begin_bins()
        self._bins.update(other._bins if other._values is None else map(_bin, other._values))

    def _begin_bins(self) -> None:
        if self._values is not None:
            self._bins.update(map(_bin, self._values))
            self._values = None

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    def percentile(self, percent: float) -> float:
        """Value below which `percent` percent of the values lie, interpolated linearly; NaN without values."""
        if not self.count:
            return math.nan
        if self._values is not None:
            ordered = sorted(self._values)
            position = (len(ordered) - 1) * percent / 100
            low = math.floor(position)
            high = min(low + 1, len(ordered) - 1)
            return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
        rank = (self.count - 1) * percent / 100
        for number in sorted(self._bins):
            rank -= self._bins[number]
            if rank < 0:
                return min(max(_middle(number), self.lowest), self.highest)
        return self.highest

    def as_json(self) -> dict[str, float]:
        """Mean, extremes and percentiles in seconds; empty without values."""
        if not self.count:
            return {}
        values = {"mean": self.mean, "min": self.lowest, "max": self.highest}
        return values | {f"p{percent:g}": self.percentile(percent) for percent in PERCENTILES}


def _bin(value: float) -> int:
    return math.floor(math.log(value) / BIN_WIDTH) if value > 0 else -(1 << 40)


def _middle(number: int) -> float:
    return math.exp((number + 0.5) * BIN_WIDTH) if number > -(1 << 40) else 0.0


@dataclass(slots=True)
class Moments:
    """Bin of a time series: integrals over time of the state, and counts of events."""

    seconds: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    used_blocks: float = 0.0
    preemptions: int = 0
    tokens: int = 0

    def add_moments(self, other: Moments) -> None:
        self.seconds += other.seconds
        self.running += other.running
        self.waiting += other.waiting
        self.used_blocks += other.used_blocks
        self.preemptions += other.preemptions
        self.tokens += other.tokens


class TimeSeries:
    """Replica's state over time in bins of equal width, which doubles when there are too many."""

    def __init__(self, width: float = 1.0) -> None:
        self.width = width
        self.bins: list[Moments] = []

    def add_span(self, start: float, moments: Moments) -> None:
        """Add integrals (value times seconds) over an interval from `start`."""
        if moments.seconds > self.width:
            self._spread(start, moments)
        else:
            self._put(start, moments)

    def _put(self, start: float, moments: Moments) -> None:
        number = int(start / self.width)
        while number >= NUM_BINS:
            self._widen()
            number = int(start / self.width)
        while number >= len(self.bins):
            self.bins.append(Moments())
        self.bins[number].add_moments(moments)

    def _spread(self, start: float, moments: Moments) -> None:
        while int((start + moments.seconds) / self.width) >= NUM_BINS:
            self._widen()
        parts = math.ceil(moments.seconds / self.width)
        seconds = moments.seconds / parts
        part = Moments(seconds, moments.running / parts, moments.waiting / parts, moments.used_blocks / parts)
        for number in range(parts - 1):
            self._put(start + number * seconds, part)
        last = replace(part, preemptions=moments.preemptions, tokens=moments.tokens)
        self._put(start + (parts - 1) * seconds, last)

    def merge(self, other: TimeSeries) -> None:
        while self.width < other.width:
            self._widen()
        ratio = self.width / other.width
        for number, moments in enumerate(other.bins):
            self._put((number + 0.5) / ratio * self.width, moments)

    def _widen(self) -> None:
        merged = []
        for number in range(0, len(self.bins), 2):
            moments = self.bins[number]
            for after in self.bins[number + 1 : number + 2]:
                moments.add_moments(after)
            merged.append(moments)
        self.bins, self.width = merged, 2 * self.width

    def rows(self, num_blocks: int) -> list[dict[str, float]]:
        """Start and time averages of each bin; nothing runs in idle time. num_blocks: blocks of all merged replicas."""
        return [
            {
                "time": number * self.width,
                "running": moments.running / self.width,
                "waiting": moments.waiting / self.width,
                "kv_usage": moments.used_blocks / self.width / num_blocks,
                "preemptions": moments.preemptions,
                "output_tokens_per_second": moments.tokens / self.width,
            }
            for number, moments in enumerate(self.bins)
        ]


@dataclass
class Metrics:
    """Results of a run. Times are seconds of the simulated clock."""

    latencies: dict[str, MergedDistribution] = field(
        default_factory=lambda: {name: MergedDistribution() for name in LATENCIES}
    )
    series: TimeSeries = field(default_factory=TimeSeries)
    num_requests: int = 0
    num_finished: int = 0
    num_refused: int = 0
    num_priorities_ignored: int = 0
    """Requests with a priority under the scheduling policy "fcfs"."""
    num_adapted: int = 0
    """Requests with adapters."""
    num_input_tokens: int = 0
    """Prompt tokens of finished requests."""
    num_output_tokens: int = 0
    """Output tokens of all sequences of finished requests."""
    num_slo_met: int = 0
    """Finished requests that met every objective."""
    end: float = 0.0
    num_steps: int = 0
    busy_seconds: float = 0.0
    """Seconds of the device's computation."""
    step_seconds: float = 0.0
    """Seconds in which a step was on its way; averages over steps are taken over them."""
    running_seconds: float = 0.0
    """Integral of the number of running requests over `step_seconds`."""
    kv_seconds: float = 0.0
    """Integral of the share of blocks in use over `step_seconds`."""
    num_blocks: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    """Engine's counters; merged replicas have the sums of those that only grow."""

    def merge(self, other: Metrics) -> None:
        for name, distribution in other.latencies.items():
            self.latencies[name].merge(distribution)
        self.series.merge(other.series)
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.end = max(self.end, other.end)
        for name in EngineStats.__struct_fields__:
            if name.endswith("_total"):
                setattr(self.stats, name, getattr(self.stats, name) + getattr(other.stats, name))
        places = self.stats.accepted_drafts_by_position, other.stats.accepted_drafts_by_position
        self.stats.accepted_drafts_by_position = [sum(counts) for counts in zip_longest(*places, fillvalue=0)]

    @property
    def mean_running(self) -> float:
        """Mean number of running requests, over the time in which steps run (Fig. 13)."""
        return self.running_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def mean_kv_usage(self) -> float:
        return self.kv_seconds / self.step_seconds if self.step_seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain data: seconds, tokens, requests, rates per second of simulated time."""
        duration = self.end or math.inf
        return {
            "num_requests": self.num_requests,
            "num_finished": self.num_finished,
            "num_refused": self.num_refused,
            "num_priorities_ignored": self.num_priorities_ignored,
            "duration": self.end,
            "request_throughput": self.num_finished / duration,
            "output_throughput": self.num_output_tokens / duration,
            "input_tokens": self.num_input_tokens,
            "output_tokens": self.num_output_tokens,
            "mean_batched_requests": self.mean_running,
            "mean_kv_usage": self.mean_kv_usage,
            "device_busy": self.busy_seconds / self.step_seconds if self.step_seconds else 0.0,
            "steps": self.num_steps,
            "num_blocks": self.num_blocks,
            "preemptions": self.stats.preemptions_total,
            "swap_preemptions": self.stats.swap_preemptions_total,
            "recomputed_tokens": self.stats.recomputed_tokens_total,
            "prefix_cache_hit_rate": self._hit_rate(),
            "draft_tokens": self.stats.draft_tokens_total,
            "accepted_draft_tokens": self.stats.accepted_draft_tokens_total,
            "encoded_images": self.stats.encoded_images_total,
            "num_adapted": self.num_adapted,
            "adapter_loads": self.stats.adapter_loads_total,
            "num_slo_met": self.num_slo_met,
            **{name: distribution.as_json() for name, distribution in self.latencies.items()},
        }

    @property
    def adapter_hit_rate(self) -> float:
        return 1 - self.stats.adapter_loads_total / self.num_adapted if self.num_adapted else 0.0

    def _hit_rate(self) -> float:
        queries = self.stats.prefix_cache_queries_total
        return self.stats.prefix_cache_hits_total / queries if queries else 0.0


_SUMS = (
    "num_requests", "num_finished", "num_refused", "num_priorities_ignored", "num_input_tokens", "num_output_tokens",
    "num_slo_met", "num_adapted", "num_steps", "busy_seconds", "step_seconds", "running_seconds", "kv_seconds",
    "num_blocks",
)  # fmt: skip
