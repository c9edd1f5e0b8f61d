"""What came out, on one page: what to fix first, parts, tests, targets, and the figures that decide designs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu.parts import Outcome
from benchmarks.gpu.records import Record
from benchmarks.gpu.targets import Verdict, kernels, seconds_by_case, verdicts

PARTS_OF_TESTS = ("gate", "tests")


@dataclass(frozen=True, slots=True)
class SuiteCounts:
    """Of all of pytest's reports of a part. failures: names."""

    passed: int
    failures: tuple[str, ...]
    left_out: int


def suite_counts(folder: Path, part: str = "tests") -> SuiteCounts:
    """A report that is missing or broken (its process was ended) counts as a failure."""
    passed, left_out, failures = 0, 0, []
    for log in sorted(folder.glob(f"{part}-*.log")):
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


def first_to_fix(found: Sequence[Record], outcomes: Sequence[Outcome], folder: Path, *, is_rehearsal: bool) -> str:
    """One thing. What makes all figures worthless comes before what makes one of them small."""
    for record in found:
        for need in record.get("needs", ()) if not is_rehearsal else ():
            if need["missing"]:
                return f"the machine: {need['name']}: {need['missing']}"
    for part in PARTS_OF_TESTS:
        counts = suite_counts(folder, part)
        if counts.failures:
            return f"{part}: {counts.failures[0]} ({len(counts.failures)} failed); no figure counts before"
    for outcome in outcomes:
        if outcome.status != "done":
            return f"the part {outcome.name}: {outcome.status}"
    errors = [record for record in found if "error" in record]
    if errors:
        return f"{_title(errors[0])}: {errors[0]['error'][:160]}"
    missing = [record["name"] for record in found if record["what"] == "missing"]
    missed = [] if is_rehearsal else sorted(verdicts(found), key=lambda verdict: verdict.shortfall, reverse=True)
    if missed and missed[0].shortfall:
        worst = missed[0]
        return f"{worst.target.text}: {worst.shown}. Look at: {worst.target.look_at}"
    if missing:
        return f"write the tests {', '.join(missing)}"
    return "nothing failed" if is_rehearsal else "nothing: every target that was measured is reached"


def summarize(found: Sequence[Record], outcomes: Sequence[Outcome], folder: Path, *, is_rehearsal: bool = False) -> str:
    """Short enough for the end of a log. is_rehearsal: say nothing of times."""
    lines = ["", f"== First to fix: {first_to_fix(found, outcomes, folder, is_rehearsal=is_rehearsal)}", "", "== Parts"]
    for outcome in outcomes:
        counts = suite_counts(folder, outcome.name) if outcome.name in PARTS_OF_TESTS else None
        tests = f"  {counts.passed} passed, {len(counts.failures)} failed, {counts.left_out} left out" if counts else ""
        lines.append(f"{outcome.name:14}{outcome.status:12}{outcome.seconds:6.0f} s{tests}")
        lines += [f"  FAILED {name}" for name in (counts.failures[:8] if counts else ())]
    lines += [f"  not there: {record['name']}" for record in found if record["what"] == "missing"]
    lines += [f"--- {each.name} ---\n{each.tail[-600:]}" for each in outcomes if each.status == "failed"][:2]
    errors = [record for record in found if "error" in record]
    lines += [f"ERROR {_title(record)}: {record['error'][:100]}" for record in errors[:6]]
    if is_rehearsal:
        counted = f"{len(found)} records, {len(errors)} of them errors"
        lines.append(f"\nA rehearsal: {counted}. Times mean nothing, targets are not judged.")
    else:
        lines += ["", "== Targets", *map(_target_line, verdicts(found))]
        for section in (_limits, _attention, _engine, _breakdown, _experiments, _throttled):
            lines += section(found)
    return "\n".join(lines)


def _title(record: Record) -> str:
    words = [str(record[key]) for key in ("what", "kernel", "case", "variant") if key in record]
    return ", ".join(words)


def _target_line(verdict: Verdict) -> str:
    return f"{verdict.word:14}{verdict.shown:>8}  {verdict.target.text}"


def _limits(found: Sequence[Record]) -> list[str]:
    return [
        f"\n== Limits: copy {record['bandwidth'] / 1e12:.2f} TB/s, bfloat16 product {record['peak'] / 1e12:.0f} TFLOP/s"
        for record in found
        if record.get("what") == "limits"
    ]


def _attention(found: Sequence[Record]) -> list[str]:
    """One line for each case: ours, and the best of the others that read pages."""
    lines = []
    for kernel in ("decode attention", "prefill attention", "ragged decode attention"):
        for record in kernels(found, kernel):
            if "share" not in record:
                continue
            others = {name: seconds_by_case(found, kernel, name).get(record["case"]) for name in LIBRARIES}
            beside = "".join(
                f"; {name} {record['seconds'] / seconds:.2f} x as fast" for name, seconds in others.items() if seconds
            )
            times = f"{record['share']:6.1%} {record['seconds'] * 1e6:9.1f} us"
            lines.append(f"{kernel.split()[0]:8} {record['case']:26}{times}{beside}")
        lines += [line for name, pages in LIBRARIES.items() if (line := library_verdict(found, kernel, name, pages))]
    return ["", "== Attention", *lines] if lines else []


PICKED_AT = 1.05
"""A library that is this factor faster, in the median over decode or over prompt cases, is picked for them."""
LIBRARIES = {"FlashAttention 3, paged": True, "FlashInfer, paged": True, "torch varlen, contiguous": False}
"""Variants of attention that are not ours, and whether they read pages, as what is picked must."""


def library_verdict(found: Sequence[Record], kernel: str, variant: str, reads_pages: bool) -> str | None:
    """A line that says whether to pick a library's attention; None where one of the two was not measured. The library's
    time is without head norms, rotation and the write, which ours has in it."""
    ours, theirs = seconds_by_case(found, kernel), seconds_by_case(found, kernel, variant)
    ratios = {case: seconds / theirs[case] for case, seconds in ours.items() if case in theirs}
    if not ratios:
        return None
    best, middle = max(ratios, key=ratios.__getitem__), median(ratios.values())
    faster = sum(ratio > 1 for ratio in ratios.values())
    verdict = "pick it" if middle >= PICKED_AT else "keep ours"
    if not reads_pages:
        verdict = "reads no pages: for comparison"
    return (
        f"{kernel}: {variant}: faster in {faster} of {len(ratios)} cases, {middle:.2f} x as fast in the median, "
        f"{ratios[best]:.2f} x at best ({best}): {verdict}"
    )


def _engine(found: Sequence[Record]) -> list[str]:
    cases = [record for record in found if record.get("part") in ("engine", "eager", "piecewise", "transformers")]
    steps = [record for record in cases if record["what"] == "ladder"]
    lines = [f"ladder ({mode}): {_ladder(steps, mode)}" for mode in dict.fromkeys(each["mode"] for each in steps)]
    for record in cases:
        if record["what"] in ("single", "idle", "long", "ragged", "batch", "half batch", "graphs"):
            rest = {key: value for key, value in record.items() if key not in ("part", "what", "mode")}
            lines.append(f"{record['what']}: {_fields(rest)}")
    return ["", "== Engine", *lines] if lines else []


def _ladder(steps: Sequence[Record], mode: str) -> str:
    return ", ".join(
        f"{record['num_seqs']}: {record['step_seconds'] * 1e3:.2f} ms {record['share']:.0%}"
        for record in steps
        if record["mode"] == mode
    )


def _fields(values: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
    )


def _breakdown(found: Sequence[Record]) -> list[str]:
    lines = []
    for record in found:
        if record.get("part") == "breakdown" and "kernels" in record:
            top = ", ".join(
                f"{row['name'][:28]} {row['microseconds_per_step']:.0f} us" for row in record["kernels"][:5]
            )
            what = f"{record['num_seqs']} of {record['max_model_len']}"
            counts = f"{record['launches_per_step']:.0f} launches, busy {record['busy']:.1%}"
            lines.append(f"{what}: {counts}, host {record['host'] * 1e3:.2f} ms; {top}")
    return ["", "== A decode step (sequences, longest allowed)", *lines] if lines else []


def _experiments(found: Sequence[Record]) -> list[str]:
    tried = [record for record in found if record.get("part") == "experiments" and "variant" in record]
    tried = [record for record in tried if "error" not in record]
    lines = []
    for what in ("bits", "attention tiles"):
        for variant in dict.fromkeys(record["variant"] for record in tried if record["what"] == what):
            of = [record for record in tried if (record["what"], record["variant"]) == (what, variant)]
            word = "same bits" if all(record["equal"] for record in of) else "OTHER BITS"
            times = ", ".join(
                f"{record.get('m', record.get('case'))}: {record['seconds'] * 1e6:.0f} us" for record in of
            )
            lines.append(f"{what}, {variant}: {word}; {times}")
    launches = [record for record in tried if record["what"] == "launch" and "seconds" in record]
    if launches:
        said = ", ".join(f"{record['variant']} {record['seconds'] * 1e6:.2f} us" for record in launches)
        lines.append(f"a small launch: {said}")
    narrow = [record for record in tried if record["what"] == "fp8"]
    if narrow:
        said = ", ".join(f"{record['variant']} x {record['m']}: {record['seconds'] * 1e6:.0f} us" for record in narrow)
        lines.append(f"8-bit floats: {said}")
    split = [record for record in tried if record["what"] == "library" and record["num_kernels"] > 1]
    names = ", ".join(f"{record['variant']} x {record['m']}" for record in split)
    lines.append(f"library products of more than one kernel: {names or 'none'}")
    return ["", "== Experiments", *lines] if tried else []


def _throttled(found: Sequence[Record]) -> list[str]:
    """Parts at whose end the card gave a reason for not running at its clocks; 1 is being idle."""
    parts = [
        record["part"]
        for record in found
        if record["what"] == "clocks"
        and (code := record["after"].get("reasons", "")).startswith("0x")
        and int(code, 16) > 1
    ]
    return ["", f"== Throttled after: {', '.join(parts)}"] if parts else []
