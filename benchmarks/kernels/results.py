"""From times to shares of the machine's limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.kernels.cases import Case, Work
from benchmarks.kernels.measure import Timing

GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine did in the rounds of a case: bytes, and operations on floats, on 8-bit integers and on bfloat16
    (None: it has no such products), a second."""

    read: float
    float_peak: float
    integer_peak: float
    bf16_peak: float | None = None

    def seconds(self, work: Work) -> float:
        """The least time that `work` takes: that of whatever it needs most of."""
        return max(
            work.bytes / self.read,
            work.float_operations / self.float_peak
            + work.integer_operations / self.integer_peak
            + (work.bf16_operations / self.bf16_peak if self.bf16_peak else 0.0),
        )


@dataclass(frozen=True, slots=True)
class Result:
    """One kernel in one type. twins: seconds of a call of each plain twin. error: largest difference from the twin's
    result, as a share of that result's largest value; sound: within what the type explains."""

    case: Case
    type: str
    timing: Timing
    twins: Mapping[str, Timing]
    limits: Limits
    error: float
    sound: bool

    @property
    def work(self) -> Work:
        return self.case.variants[self.type]

    @property
    def name(self) -> str:
        return f"{self.case.name} {self.type}"

    @property
    def seconds(self) -> float:
        return self.timing.median

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.work.bytes / self.seconds

    @property
    def rate(self) -> float:
        """Operations a second, of all types together."""
        return self.work.operations / self.seconds

    @property
    def bandwidth_share(self) -> float:
        return self.bandwidth / self.limits.read

    @property
    def peak_share(self) -> float:
        """Of the float32 peak, whatever is multiplied: integers and bfloat16 may exceed it."""
        return self.rate / self.limits.float_peak

    @property
    def bf16_share(self) -> float:
        """Of the bfloat16 peak; 0 where there is none."""
        return self.rate / self.limits.bf16_peak if self.limits.bf16_peak else 0.0

    @property
    def roofline_share(self) -> float:
        """Of the speed that the limits allow."""
        return self.limits.seconds(self.work) / self.seconds

    def speedup(self, twin: str) -> float | None:
        """How many times faster than a twin; None where there is no such twin."""
        return self.twins[twin].median / self.seconds if twin in self.twins else None


def result_json(result: Result) -> dict[str, Any]:
    """Plain data: seconds, bytes, operations; rates a second."""
    case, work, limits = result.case, result.work, result.limits
    return {
        "kernel": case.kernel,
        "model": case.model.name,
        "shape": case.shape,
        "rows": case.rows,
        "type": result.type,
        "bytes": work.bytes,
        "float_operations": work.float_operations,
        "integer_operations": work.integer_operations,
        "bf16_operations": work.bf16_operations,
        "seconds": result.seconds,
        "samples": list(result.timing.samples),
        "bandwidth": result.bandwidth,
        "bandwidth_share": result.bandwidth_share,
        "rate": result.rate,
        "peak_share": result.peak_share,
        "roofline_share": result.roofline_share,
        "limits": limits_json(limits),
        "twin_seconds": {name: timing.median for name, timing in result.twins.items()},
        "speedup": {name: result.speedup(name) for name in result.twins},
        "error": result.error,
        "sound": result.sound,
    }


def limits_json(limits: Limits) -> dict[str, float | None]:
    return {
        "read": limits.read,
        "float_peak": limits.float_peak,
        "integer_peak": limits.integer_peak,
        "bf16_peak": limits.bf16_peak,
    }


def overall_limits(results: Sequence[Result]) -> Limits:
    """The medians over all cases."""
    from statistics import median

    every = list({id(result.limits): result.limits for result in results}.values())
    bf16_peaks = [limits.bf16_peak for limits in every if limits.bf16_peak is not None]
    return Limits(
        read=median(limits.read for limits in every),
        float_peak=median(limits.float_peak for limits in every),
        integer_peak=median(limits.integer_peak for limits in every),
        bf16_peak=median(bf16_peaks) if bf16_peaks else None,
    )
