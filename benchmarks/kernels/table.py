"""The tables of `python -m benchmarks.kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from rich.console import Console
from rich.table import Table

from benchmarks.kernels.results import GIGA, Result, overall_limits
from benchmarks.kernels.targets import Verdict

COLUMNS = (
    ("kernel", "left"),
    ("model", "left"),
    ("shape", "left"),
    ("type", "left"),
    ("rows", "right"),
    ("µs", "right"),
    ("±", "right"),
    ("GB/s", "right"),
    ("of read", "right"),
    ("GFLOP/s", "right"),
    ("of peak", "right"),
    ("of limit", "right"),
    ("× f32", "right"),
    ("× bf16", "right"),
)
MICROSECONDS = 1e6


def print_run(console: Console, results: Sequence[Result], found: Sequence[Verdict], title: str) -> None:
    """All tables of a run with at least one result."""
    print_results(console, results, title)
    print_limits(console, results)
    if found:
        print_verdicts(console, found)


def print_results(console: Console, results: Sequence[Result], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for name, side in COLUMNS:
        table.add_column(name, justify="left" if side == "left" else "right", no_wrap=True)
    previous = ""
    for result in results:
        group = f"{result.case.kernel} {result.case.model.name} {result.case.shape}"
        if previous and group != previous:
            table.add_section()
        previous = group
        table.add_row(*_cells(result))
    console.print(table)


def _cells(result: Result) -> list[str]:
    case, work = result.case, result.work
    computes = bool(work.operations)
    return [
        case.kernel,
        case.model.name,
        case.shape,
        result.type if result.sound else f"{result.type} WRONG ({result.error:.1g})",
        f"{case.rows:,}",
        f"{result.seconds * MICROSECONDS:,.1f}",
        _percent(result.timing.spread),
        f"{result.bandwidth / GIGA:.1f}",
        _percent(result.bandwidth_share),
        f"{result.rate / GIGA:.1f}" if computes else "",
        _percent(result.peak_share) if computes else "",
        _percent(result.roofline_share),
        _times(result.speedup("f32")),
        _times(result.speedup("bf16")),
    ]


def print_limits(console: Console, results: Sequence[Result]) -> None:
    """Over all cases: limits that are far apart say that the machine had other work to do."""
    table = Table(title="limits of this machine in this run", title_justify="left")
    table.add_column("")
    for name in ("median", "lowest", "highest"):
        table.add_column(name, justify="right")
    overall, every = overall_limits(results), [result.limits for result in results]
    for text, unit, of in (
        ("streaming read", "GB/s", attrgetter("read")),
        ("fp32 multiply and add", "GFLOP/s", attrgetter("float_peak")),
        ("int8 dot products", "GOP/s", attrgetter("integer_peak")),
        ("bf16 dot products", "GFLOP/s", attrgetter("bf16_peak")),
    ):
        if of(overall) is None:
            continue
        values = (of(overall), min(map(of, every)), max(map(of, every)))
        table.add_row(text, *(f"{value / GIGA:,.1f} {unit}" for value in values))
    console.print(table)


def print_verdicts(console: Console, found: Sequence[Verdict]) -> None:
    table = Table(title="targets", title_justify="left")
    for name in ("target", "of", "aim", "lowest", "median", "reached", "lowest at"):
        table.add_column(name, justify="right" if name in ("aim", "lowest", "median", "reached") else "left")
    for verdict in found:
        table.add_row(
            verdict.target.text,
            verdict.target.of,
            _percent(verdict.target.share),
            _percent(verdict.lowest),
            _percent(verdict.median),
            f"{verdict.num_reached} of {verdict.num_cases}",
            verdict.worst.name,
        )
    console.print(table)


def _percent(share: float) -> str:
    return f"{share:.0%}"


def _times(factor: float | None) -> str:
    return "" if factor is None else f"{factor:.2f}"
