"""What came out, in a few lines: tests, targets, kernels, engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu.parts import Outcome
from benchmarks.gpu.records import Record

Value = float | None


@dataclass(frozen=True, slots=True)
class Target:
    """text: what is asked. value: from the records; None where they do not say. reached: of a value. percent: how it is
    shown."""

    text: str
    value: Callable[[Sequence[Record]], Value]
    reached: Callable[[float], bool]
    percent: bool = True


@dataclass(frozen=True, slots=True)
class Verdict:
    """value None: not measured."""

    target: Target
    value: Value

    @property
    def word(self) -> str:
        if self.value is None:
            return "not measured"
        return "reached" if self.target.reached(self.value) else "MISSED"

    @property
    def shown(self) -> str:
        if self.value is None:
            return "-"
        return f"{self.value:.1%}" if self.target.percent else f"{self.value:.2f}"

    def to_json(self) -> dict[str, Any]:
        return {"target": self.target.text, "value": self.value, "verdict": self.word}


def kernels(found: Sequence[Record], kernel: str, variant: str = "triton") -> list[Record]:
    """What was measured of a kernel in one way."""
    return [
        record
        for record in found
        if record.get("what") == "kernel" and (record["kernel"], record["variant"]) == (kernel, variant)
    ]


def least_share(*names: str, large: bool = False) -> Callable[[Sequence[Record]], Value]:
    """The worst share of its limit that a case of these kernels reached. large: of 8192 tokens only, where a launch
    does not count."""

    def value(found: Sequence[Record]) -> Value:
        cases = [record for name in names for record in kernels(found, name)]
        shares = [record["share"] for record in cases if "share" in record]
        if large:
            shares = [r["share"] for r in cases if "share" in r and r["case"] in ("8192 tokens", "64 blocks")]
        return min(shares, default=None)

    return value


def paged_overhead(found: Sequence[Record]) -> Value:
    """Median over the decode cases: how much longer over scattered blocks than in one piece."""
    contiguous = {r["case"]: r["seconds"] for r in kernels(found, "decode attention", "contiguous") if "seconds" in r}
    ratios = [
        record["seconds"] / contiguous[record["case"]] - 1
        for record in kernels(found, "decode attention")
        if "seconds" in record and record["case"] in contiguous
    ]
    return median(ratios) if ratios else None


def engine(what: str, field: str) -> Callable[[Sequence[Record]], Value]:
    """A field of the one record of an engine's task in full mode."""

    def value(found: Sequence[Record]) -> Value:
        values = [
            record[field]
            for record in found
            if record.get("what") == what and record.get("mode", "full") == "full" and field in record
        ]
        return values[-1] if values else None

    return value


def step_seconds(found: Sequence[Record], mode: str) -> dict[int, float]:
    """Number of sequences -> seconds of a decode step."""
    return {
        record["num_seqs"]: record["step_seconds"]
        for record in found
        if record.get("what") == "ladder" and record.get("mode") == mode
    }


def speed_up(fast: str, slow: str) -> Callable[[Sequence[Record]], Value]:
    """Median over the batch sizes: by how much steps are faster in one mode than in the other."""

    def value(found: Sequence[Record]) -> Value:
        one, other = step_seconds(found, fast), step_seconds(found, slow)
        ratios = [other[size] / one[size] - 1 for size in one if size in other]
        return median(ratios) if ratios else None

    return value


def over_transformers(found: Sequence[Record]) -> Value:
    """Tokens a second on the same work."""
    ours, theirs = engine("peer work", "tokens_per_second")(found), engine("transformers", "tokens_per_second")(found)
    return None if ours is None or theirs is None else ours / theirs


TARGETS = (
    Target("decode attention >= 80 % of its limit", least_share("decode attention"), lambda share: share >= 0.8),
    Target("prefill attention >= 60 % of its limit", least_share("prefill attention"), lambda share: share >= 0.6),
    Target(
        "norms, activations, embedding, copies >= 85 % of bandwidth",
        least_share("RMSNorm", "RMSNorm of a sum", "gated SiLU", "embedding", "block copy", large=True),
        lambda share: share >= 0.85,
    ),
    Target("Qwen3-8B, batch 1 >= 85 % of the weights' bandwidth", engine("single", "share"), lambda s: s >= 0.85),
    Target("batch 256, 1K in, 1K out >= 70 % of the roofline", engine("batch", "share"), lambda share: share >= 0.7),
    Target("GPU idle between steps < 3 %", engine("idle", "idle"), lambda share: share < 0.03),
    Target("full graphs over eager >= 6 % faster", speed_up("full", "eager"), lambda gain: gain >= 0.06),
    Target("piecewise graphs over eager >= 6 % faster", speed_up("piecewise", "eager"), lambda gain: gain >= 0.06),
    Target("full over piecewise graphs <= 7 % faster", speed_up("full", "piecewise"), lambda gain: gain <= 0.07),
    Target("over Transformers' continuous batching >= 5 x", over_transformers, lambda r: r >= 5, percent=False),
    Target("paged over contiguous attention < 10 % slower", paged_overhead, lambda overhead: overhead < 0.1),
)


def verdicts(found: Sequence[Record], targets: Iterable[Target] = TARGETS) -> list[Verdict]:
    """All targets, measured or not."""
    return [Verdict(target, target.value(found)) for target in targets]


@dataclass(frozen=True, slots=True)
class SuiteCounts:
    """Of all of pytest's reports in a folder. failures: names."""

    passed: int
    failures: tuple[str, ...]
    left_out: int


def suite_counts(folder: Path) -> SuiteCounts:
    """A report that is missing or broken (its process was ended) counts as a failure."""
    passed, left_out, failures = 0, 0, []
    for log in sorted(folder.glob("tests-*.log")):
        report = log.with_suffix(".xml")
        try:
            cases = list(ElementTree.parse(report).iter("testcase"))
        except (OSError, ElementTree.ParseError):
            failures.append(f"{report.name}: no report")
            continue
        for case in cases:
            kinds = {child.tag for child in case}
            if kinds & {"failure", "error"}:
                failures.append(f"{case.get('classname')}.{case.get('name')}")
            elif "skipped" in kinds:
                left_out += 1
            else:
                passed += 1
    return SuiteCounts(passed, tuple(failures), left_out)


def summarize(found: Sequence[Record], outcomes: Sequence[Outcome], folder: Path, *, is_rehearsal: bool = False) -> str:
    """Short enough for the end of a log. is_rehearsal: say nothing of times."""
    lines = ["", "== Parts"]
    lines += [f"{outcome.name:14}{outcome.status:12}{outcome.seconds:6.0f} s" for outcome in outcomes]
    lines += [f"--- {outcome.name} ---\n{outcome.tail[-1200:]}" for outcome in outcomes if outcome.status == "failed"]
    if any(outcome.name == "tests" for outcome in outcomes):
        counts = suite_counts(folder)
        lines += ["", f"== Tests: {counts.passed} passed, {len(counts.failures)} failed, {counts.left_out} left out"]
        lines += [f"FAILED {name}" for name in counts.failures[:20]]
    if is_rehearsal:
        errors = sum("error" in record for record in found)
        lines += [
            "",
            f"A rehearsal: {len(found)} records, {errors} of them errors. Times mean nothing, targets are not judged.",
        ]
    else:
        lines += _limits(found) + _table(found) + _engine(found) + _libraries(found) + ["", "== Targets"]
        lines += [f"{verdict.word:14}{verdict.shown:>8}  {verdict.target.text}" for verdict in verdicts(found)]
    lines.append(f"\n{folder / 'results.json'}")
    return "\n".join(lines)


def _limits(found: Sequence[Record]) -> list[str]:
    return [
        f"\n== Limits: copy {record['bandwidth'] / 1e12:.2f} TB/s, bfloat16 product {record['peak'] / 1e12:.0f} TFLOP/s"
        for record in found
        if record.get("what") == "limits"
    ]


def _table(found: Sequence[Record]) -> list[str]:
    cases = [record for record in found if record.get("what") == "kernel"]
    lines = ["", "== Kernels (share of the limit, microseconds)"] if cases else []
    for record in cases:
        name = f"{record['kernel']}, {record['case']}, {record['variant']}"
        if "error" in record:
            lines.append(f"{name:72}  ERROR {record['error'][:80]}")
        else:
            lines.append(f"{name:72}{record['share']:7.1%}{record['seconds'] * 1e6:12.1f}")
    return lines


PICKED_AT = 1.05
"""So many times as fast, in the median over decode or over prompt cases, a library is picked for them."""
LIBRARIES = {"FlashInfer, paged": True, "torch varlen, contiguous": False}
"""Variants of attention that are not ours, and whether they read pages, as what is picked must."""


def library_verdict(found: Sequence[Record], kernel: str, variant: str, *, reads_pages: bool) -> str | None:
    """A line that says whether to pick a library's attention; None where ours was not measured. The library's time is
    without head norms, rotation and the write, which ours has in it."""
    ours = {record["case"]: record["seconds"] for record in kernels(found, kernel) if "seconds" in record}
    theirs = {record["case"]: record["seconds"] for record in kernels(found, kernel, variant) if "seconds" in record}
    ratios = {case: seconds / theirs[case] for case, seconds in ours.items() if case in theirs}
    if not ours:
        return None
    if not ratios:
        return f"{kernel}: {variant}: not measured (not installed, or it failed)"
    best, middle = max(ratios, key=ratios.__getitem__), median(ratios.values())
    faster = sum(ratio > 1 for ratio in ratios.values())
    verdict = "pick it" if middle >= PICKED_AT else "keep ours"
    if not reads_pages:
        verdict = "reads no pages: for comparison"
    return (
        f"{kernel}: {variant}: faster in {faster} of {len(ratios)} cases, {middle:.2f} x as fast in the median, "
        f"{ratios[best]:.2f} x at best ({best}): {verdict}"
    )


def _libraries(found: Sequence[Record]) -> list[str]:
    lines = [
        library_verdict(found, kernel, variant, reads_pages=reads_pages)
        for kernel in ("decode attention", "prefill attention")
        for variant, reads_pages in LIBRARIES.items()
    ]
    given = [line for line in lines if line is not None]
    return ["", "== Attention of other libraries (docs/decisions/0014)", *given] if given else []


def _engine(found: Sequence[Record]) -> list[str]:
    cases = [record for record in found if record.get("part") in ("engine", "transformers")]
    lines = ["", "== Engine"] if cases else []
    for record in cases:
        rest = {key: value for key, value in record.items() if key not in ("part", "what", "mode", "detail")}
        fields = ", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in rest.items()
        )
        lines.append(f"{record['what']} ({record.get('mode', '-')}): {fields}")
    return lines
