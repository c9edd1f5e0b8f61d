"""What the kernels are meant to reach, and how many of the measured cases do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.kernels.results import Result

BANDWIDTH = "of the streaming bandwidth"
PEAK = "of the fp32 peak"
BF16_PEAK = "of the bf16 peak"


@dataclass(frozen=True, slots=True)
class Target:
    """share: what each case of `kernel` in `type` (None: any) that is `meant` must reach `of` one of the limits."""

    text: str
    share: float
    of: str
    kernel: str
    type: str | None
    meant: Callable[[Result], bool]

    def reached(self, result: Result) -> float:
        shares = {BANDWIDTH: result.bandwidth_share, PEAK: result.peak_share, BF16_PEAK: result.bf16_share}
        return shares[self.of]

    def applies(self, result: Result) -> bool:
        return result.case.kernel == self.kernel and self.type in (None, result.type) and self.meant(result)


def _one_row(result: Result) -> bool:
    return result.case.rows == 1


def _eight_rows(result: Result) -> bool:
    return result.case.rows == 8


def _many_rows(result: Result) -> bool:
    return result.case.rows >= 32


def _long_context(result: Result) -> bool:
    return int(result.case.shape) >= 1024


def _delta_prompt(result: Result) -> bool:
    return result.case.shape == "delta-prompt"


def _delta_decode(result: Result) -> bool:
    return result.case.shape == "delta-decode"


def _always(result: Result) -> bool:
    return True


TARGETS = (
    Target("linear bf16, m = 1", 0.85, BANDWIDTH, "linear", "bf16", _one_row),
    Target("linear int8, m = 1", 0.85, BANDWIDTH, "linear", "int8", _one_row),
    Target("linear int4, m = 1", 0.70, BANDWIDTH, "linear", "int4", _one_row),
    Target("linear bf16, m = 8", 0.55, PEAK, "linear", "bf16", _eight_rows),
    Target("linear bf16, m >= 32", 0.75, PEAK, "linear", "bf16", _many_rows),
    Target("linear w16a16, m = 1", 0.85, BANDWIDTH, "linear", "w16a16", _one_row),
    Target("linear w16a16, m >= 32", 0.75, BF16_PEAK, "linear", "w16a16", _many_rows),
    Target("linear w8a8, m >= 32", 2.5, PEAK, "linear", "w8a8", _many_rows),
    Target("decode attention, context >= 1K", 0.75, BANDWIDTH, "decode", None, _long_context),
    Target("delta rule, prompt", 0.40, PEAK, "delta", None, _delta_prompt),
    Target("delta rule, decode", 0.60, BANDWIDTH, "delta", None, _delta_decode),
    Target("prefill attention", 0.50, PEAK, "prefill", None, _always),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target against its cases. worst: the case that is furthest from it."""

    target: Target
    worst: Result
    median: float
    num_cases: int
    num_reached: int

    @property
    def lowest(self) -> float:
        return self.target.reached(self.worst)


def verdicts(results: Sequence[Result], targets: Iterable[Target] = TARGETS) -> list[Verdict]:
    """For each target that has cases among the results. A result that is not sound reaches nothing and is left out."""
    found = []
    for target in targets:
        cases = [result for result in results if result.sound and target.applies(result)]
        if not cases:
            continue
        shares = [target.reached(result) for result in cases]
        found.append(
            Verdict(
                target=target,
                worst=min(cases, key=target.reached),
                median=median(shares),
                num_cases=len(cases),
                num_reached=sum(share >= target.share for share in shares),
            )
        )
    return found


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "target": verdict.target.text,
        "share": verdict.target.share,
        "of": verdict.target.of,
        "lowest": verdict.lowest,
        "lowest_case": verdict.worst.name,
        "median": verdict.median,
        "num_cases": verdict.num_cases,
        "num_reached": verdict.num_reached,
    }
