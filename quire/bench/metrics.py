"""Statistics of request timelines of `quire bench serve`, in seconds (reports: milliseconds). TTFT: request sent to
first output chunk. E2EL: request sent to last output chunk. TPOT: (E2EL - TTFT) / (output tokens - 1). ITL: gaps
between output chunks."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.errors import UserError, nearest_name

METRICS = ("ttft", "tpot", "itl", "e2el")
METRIC_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
DEFAULT_PERCENTILES = (50.0, 90.0, 99.0)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as the client saw it; times on one clock, in seconds. due: planned time of sending. sent: actual
    time. chunk_times: arrivals of chunks with output. error: reason of a failure. Token counts are the server's
    (`usage`) or the number of chunks."""

    due: float
    sent: float
    chunk_times: tuple[float, ...] = ()
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None

    @property
    def end(self) -> float:
        return self.chunk_times[-1] if self.chunk_times else self.sent

    @property
    def ttft(self) -> float:
        return self.chunk_times[0] - self.sent

    @property
    def e2el(self) -> float:
        return self.end - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per output token; None for a single one."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.num_output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.chunk_times)]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distribution of one quantity in its unit. percentiles: percent -> value, linear between neighbours (numpy's
    default)."""

    count: int
    mean: float
    median: float
    std: float
    min: float
    max: float
    percentiles: Mapping[float, float]

    def scaled(self, factor: float) -> dict[str, float]:
        """Flat mapping (`mean`, `median`, `std`, `min`, `max`, `p50` ...), every value times `factor`."""
        values = {name: getattr(self, name) for name in ("mean", "median", "std", "min", "max")}
        values |= {f"p{percent:g}": value for percent, value in self.percentiles.items()}
        return {name: value * factor for name, value in values.items()}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Value below which `percent` percent of the ascending `ordered` lie, interpolated linearly."""
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize_values(
    values: Sequence[float], percentiles: Sequence[float] = DEFAULT_PERCENTILES
) -> Distribution | None:
    """Mean, median, population standard deviation, extremes and percentiles. None without values."""
    if not values:
        return None
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered)
    return Distribution(
        count=len(ordered),
        mean=mean,
        median=percentile(ordered, 50),
        std=math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered)),
        min=ordered[0],
        max=ordered[-1],
        percentiles={percent: percentile(ordered, percent) for percent in percentiles},
    )


@dataclass(frozen=True, slots=True)
class ServingReport:
    """Figures of one `quire bench serve` run. Rates are per second of `duration`: first request sent to last output
    chunk."""

    duration: float
    num_requests: int
    num_completed: int
    failures: Mapping[str, int]
    """Reason -> number of requests."""
    num_prompt_tokens: int
    num_output_tokens: int
    num_good: int | None
    """Requests that met every service-level objective."""
    latencies: Mapping[str, Distribution | None]
    """Metric of METRICS -> distribution in seconds over the completed requests."""
    max_send_delay: float
    """Longest seconds from due time to sending (`max_concurrency`, a slow client)."""

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())

    def rate(self, amount: float) -> float:
        return amount / self.duration if self.duration > 0 else 0.0


def summarize(
    records: Sequence[RequestRecord],
    *,
    goodput: Mapping[str, float] | None = None,
    percentiles: Sequence[float] = DEFAULT_PERCENTILES,
) -> ServingReport:
    """Summarise a run's records. goodput: metric -> limit in seconds; a good request meets all."""
    done = [record for record in records if record.error is None]
    duration = max((r.end for r in records), default=0.0) - min((r.sent for r in records), default=0.0)
    samples = {
        "ttft": [r.ttft for r in done],
        "tpot": [tpot for r in done if (tpot := r.tpot) is not None],
        "itl": [gap for r in done for gap in r.itl],
        "e2el": [r.e2el for r in done],
    }
    return ServingReport(
        duration=duration,
        num_requests=len(records),
        num_completed=len(done),
        failures=dict(Counter(r.error for r in records if r.error is not None).most_common()),
        num_prompt_tokens=sum(r.num_prompt_tokens for r in done),
        num_output_tokens=sum(r.num_output_tokens for r in done),
        num_good=sum(meets(r, goodput) for r in done) if goodput else None,
        latencies={name: summarize_values(values, percentiles) for name, values in samples.items()},
        max_send_delay=max((r.sent - r.due for r in records), default=0.0),
    )


def meets(record: RequestRecord, objectives: Mapping[str, float]) -> bool:
    """True if a completed request stays within every limit (seconds). A single token has no TPOT."""
    for metric, limit in objectives.items():
        value = getattr(record, metric)
        if metric == "itl":
            value = max(value, default=None)
        if value is not None and value > limit:
            return False
    return True


def parse_goodput(terms: Sequence[str]) -> dict[str, float]:
    """Metric -> seconds from `["ttft:500", "tpot:50"]` (milliseconds). Raises UserError for anything else."""
    objectives: dict[str, float] = {}
    for term in terms:
        name, _, text = term.partition(":")
        if name not in METRICS:
            known = ", ".join(METRICS)
            raise UserError(f"--goodput knows {known}, not {name!r}{nearest_name(name, METRICS)}", param="goodput")
        try:
            limit = float(text)
        except ValueError:
            limit = math.nan
        if not (math.isfinite(limit) and limit > 0):
            raise UserError(f"--goodput {term!r}: expected METRIC:MILLISECONDS, such as {name}:500", param="goodput")
        objectives[name] = limit / 1000
    return objectives
