"""`python -m benchmarks.paper`: the paper's evaluation, simulated; with --engine what fits on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.figure import FULL, QUICK, Figure
from benchmarks.paper.figure import Row as FigureRow
from benchmarks.paper.figures import Row, rows
from benchmarks.paper.gain import Gain
from benchmarks.paper.gain import rows as gain_rows
from benchmarks.paper.measure import Usage, run, write_text
from benchmarks.paper.run import FIGURES, plot, print_table, run_trials
from benchmarks.paper.workloads import draw
from quire.cli.bench_mode import Mode, count_flag, json_flag, options_json
from quire.cli.main import run_program
from quire.cli.parser import Parser
from quire.cli.session import import_executor
from quire.config.options import EngineOptions
from quire.engine.client import DEFAULT_EXECUTOR
from quire.engine.core import EngineCore
from quire.errors import UserError, nearest_name
from quire.simulator.plots import check_matplotlib
from quire.simulator.workloads import ALPACA, LONGEST_INPUT, SHAREGPT, SIGMA

PROGRAM = "python -m benchmarks.paper"
NUM_REQUESTS = {ALPACA.name: 256, SHAREGPT.name: 32}
NUM_REQUESTS_QUICK = {ALPACA.name: 64, SHAREGPT.name: 8}
GAIN_REQUESTS, GAIN_REQUESTS_QUICK = 80, 24
GAIN_ROUNDS, GAIN_ROUNDS_QUICK = 3, 1
TEXT_TOKENS = 32 * LONGEST_INPUT
MAX_NUM_SEQS = 96
NUM_BLOCKS = 6000
"""More than the running sequences ever need, so that nothing is preempted."""


def _flags(parser: Parser) -> None:
    group = parser.add_argument_group("benchmark options")
    group.add_argument("--engine", action="store_true", help="run on the real engine of this machine, not simulated")
    group.add_argument("--quick", action="store_true", help="a fraction of the requests; the numbers scatter more")
    group.add_argument("--figures", metavar="NAMES", help=f"only these, as a list: {','.join(_names())}")
    group.add_argument("--plots", metavar="DIR", type=Path, help="draw each figure into a PNG file there")
    count_flag(group, "--processes", None, "simulations at a time (default: one per core)")
    count_flag(group, "--seed", None, "of the prompts and their order, with --engine (0)", minimum=0)
    count_flag(group, "--threads", None, "compute threads, with --engine (default: one per core)")
    json_flag(group)


def _names() -> list[str]:
    return [figure.name for figure in FIGURES]


def _run(namespace: argparse.Namespace) -> int:
    if namespace.engine:
        _refuse(namespace, ("figures", "plots", "processes"), "is for the simulated figures: leave out --engine")
        return _run_engine(namespace)
    _refuse(namespace, ("seed", "threads"), "is for the real engine: add --engine")
    return _run_simulated(namespace)


def _refuse(namespace: argparse.Namespace, flags: Sequence[str], why: str) -> None:
    for flag in flags:
        if getattr(namespace, flag) is not None:
            raise UserError(f"--{flag} {why}", param=flag)


def _run_simulated(namespace: argparse.Namespace) -> int:
    from quire.cli import report

    report.check_writable(namespace.json)
    if namespace.plots is not None:
        check_matplotlib()
        namespace.plots.mkdir(parents=True, exist_ok=True)
    figures = _chosen(namespace.figures)
    scale = QUICK if namespace.quick else FULL
    results = run_trials(figures, scale, namespace.processes, plots=namespace.plots is not None)
    table = []
    for figure in figures:
        rows = figure.rows(results, scale)
        print_table(figure, rows)
        table += rows
        if namespace.plots is not None:
            plot(figure, results, scale, namespace.plots)
    result = {
        "benchmark": "paper",
        "options": options_json(namespace),
        "rows": _rows_json(table),
        "comments": [
            {
                "figure": row.figure,
                "quantity": row.quantity,
                "unit": row.unit,
                "at_most": row.at_most,
                "is_near": row.is_near,
                "why": row.why,
            }
            for row in table
        ],
    }
    report.write_json(namespace.json, result)
    return 0


def _rows_json(table: Sequence[FigureRow]) -> list[dict[str, Any]]:
    return [{"figure": row.figure, "quantity": row.quantity, "ours": row.ours, "paper": row.paper} for row in table]


def _chosen(names: str | None) -> list[Figure]:
    """The figures that are asked for, in the paper's order."""
    wanted = _names() if names is None else [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in _names():
            nearest = nearest_name(name, _names())
            raise UserError(f"unknown figure {name!r}{nearest} (known: {', '.join(_names())})", param="figures")
    return [figure for figure in FIGURES if figure.name in wanted]


def _run_engine(namespace: argparse.Namespace) -> int:
    from quire.cli import report

    report.check_writable(namespace.json)
    counts = NUM_REQUESTS_QUICK if namespace.quick else NUM_REQUESTS
    table = rows()
    core = _core(namespace)
    try:
        with report.progress_bar("requests", sum(counts[row.shape.name] for row in table)) as tick:
            usages = _measure(core, table, counts, namespace.seed or 0, tick)
    finally:
        core.shutdown()
    gains = _measure_gain(namespace)
    _print(table, usages)
    _print_gain(gains)
    result = {"benchmark": "paper", "options": options_json(namespace), "gain": _gain_json(gains)}
    found = _json(table, usages)
    found["rows"] += _rows_json(gain_rows(gains))
    report.write_json(namespace.json, result | found)
    return 0


def _measure_gain(namespace: argparse.Namespace) -> list[Gain]:
    from benchmarks.paper import gain
    from quire.cli import report

    work = gain.requests(GAIN_REQUESTS_QUICK if namespace.quick else GAIN_REQUESTS, namespace.seed or 0)
    num_rounds = GAIN_ROUNDS_QUICK if namespace.quick else GAIN_ROUNDS
    total = len(work) * len(gain.COMPARED) * num_rounds
    with gain.dummy_model() as model, report.progress_bar("paged against contiguous", total) as tick:

        def on_done(count: int) -> None:
            for _ in range(count):
                tick()

        return gain.measure(
            model, DEFAULT_EXECUTOR, work, num_rounds=num_rounds, num_threads=namespace.threads, on_done=on_done
        )


def _print_gain(gains: list[Gain]) -> None:
    from rich.table import Table

    from quire.cli import report

    paged = gains[-1]
    title = "Throughput on the engine: OPT-125M's shape, ShareGPT's lengths and the pool of Fig. 13a divided by four"
    printed = Table(title=title, title_justify="left")
    printed.add_column("scheduler")
    for column in ("requests in the batch", "steps", "tokens/s", f"{paged.system} over it"):
        printed.add_column(column, justify="right")
    for each in gains:
        printed.add_row(
            each.system,
            f"{each.mean_running:.1f}",
            f"{each.num_steps:,}",
            f"{each.throughput:,.1f}",
            f"{paged.throughput / each.throughput:.2f}",
        )
    report.console().print(printed)


def _gain_json(gains: list[Gain]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(each) | {"throughput": each.throughput} for each in gains]


def _core(namespace: argparse.Namespace) -> EngineCore:
    """The bundled model. Nothing is cached: only sharing inside a request counts."""
    from quire.engine.loop import build_core

    import_executor()
    options = EngineOptions(
        max_num_seqs=MAX_NUM_SEQS,
        num_blocks_override=NUM_BLOCKS,
        enable_prefix_caching=False,
        num_threads=namespace.threads,
    )
    return build_core(options, DEFAULT_EXECUTOR)


def _measure(core: EngineCore, table: list[Row], counts: dict[str, int], seed: int, tick: Any) -> list[Usage]:
    text = write_text(core, TEXT_TOKENS, seed)

    def on_done(count: int) -> None:
        for _ in range(count):
            tick()

    usages = []
    for row in table:
        requests = draw(row.shape, counts[row.shape.name], text, seed)
        usages.append(run(core, row.run_name, requests, row.params, on_done=on_done))
    return usages


def _print(table: list[Row], usages: list[Usage]) -> None:
    from rich.table import Table

    from quire.cli import report

    printed = Table(title="Sharing and waste on the engine, percent", title_justify="left")
    for column in ("figure", "quantity"):
        printed.add_column(column)
    for column in ("ours", "paper", "inside?"):
        printed.add_column(column, justify="right")
    for row, usage in zip(table, usages, strict=True):
        percent = row.value(usage)
        inside = "yes" if row.band.holds(percent) else f"no, {row.band.distance(percent):+.1f}"
        printed.add_row(row.figure, row.quantity, f"{percent:.1f}", str(row.band), inside)
    report.console().print(printed)


def _json(table: list[Row], usages: list[Usage]) -> dict[str, Any]:
    """`rows`: where the paper has a number for the very quantity. `measured`: everything."""
    measured = [
        {
            "figure": row.figure,
            "quantity": row.quantity,
            "ours": row.value(usage),
            "paper": row.band.printed,
            "paper_low": row.band.low,
            "paper_high": row.band.high,
            "inside": row.band.holds(row.value(usage)),
            "steps": usage.num_steps,
            "generated_tokens": usage.num_generated_tokens,
            "preemptions": usage.num_preemptions,
        }
        for row, usage in zip(table, usages, strict=True)
    ]
    wanted = ("figure", "quantity", "ours", "paper")
    return {
        "unit": "percent (Fig. 2 and 15)",
        "sigma": SIGMA,
        "rows": [{name: entry[name] for name in wanted} for entry in measured if entry["paper"] is not None],
        "measured": measured,
    }


MODE = Mode(
    summary="the paper's evaluation: simulated, or what fits on the real engine",
    arguments="[simulate] [--engine] [options]",
    description=(
        "Simulate the paper's evaluation (Quire against Orca and FasterTransformer on the paper's servers), and print "
        "ours / paper / ratio for each number. With --engine, run workloads of the same shape on the real engine of "
        "this machine. `simulate --policy NAME` is `quire simulate` with a baseline of the paper as the scheduler."
    ),
    add_flags=_flags,
    run=_run,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and return the exit status, as `quire` does."""
    return run_program(PROGRAM, _dispatch, sys.argv[1:] if arguments is None else arguments)


def _dispatch(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] == "simulate":
        from benchmarks.paper import policy

        return policy.main(arguments[1:])
    return MODE.main(PROGRAM, arguments)
