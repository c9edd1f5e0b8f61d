"""`quire bench paper --engine`: the paper's figures about sharing and waste, measured on the real engine."""

from __future__ import annotations

import argparse
from typing import Any

from quire.bench.paper.figures import Row, rows
from quire.bench.paper.measure import Usage, run, write_text
from quire.bench.paper.workloads import draw
from quire.cli.bench_mode import Mode, count_flag, json_flag, options_json
from quire.cli.parser import Parser
from quire.cli.session import import_executor
from quire.config.options import EngineOptions
from quire.engine.client import DEFAULT_EXECUTOR
from quire.engine.core import EngineCore
from quire.errors import UserError
from quire.simulator.workloads import ALPACA, LONGEST_INPUT, SHAREGPT, SIGMA

NUM_REQUESTS = {ALPACA.name: 256, SHAREGPT.name: 32}
NUM_REQUESTS_QUICK = {ALPACA.name: 64, SHAREGPT.name: 8}
TEXT_TOKENS = 32 * LONGEST_INPUT
MAX_NUM_SEQS = 96
NUM_BLOCKS = 6000
"""More than the running sequences ever need, so that nothing is preempted."""


def _flags(parser: Parser) -> None:
    group = parser.add_argument_group("benchmark options")
    group.add_argument(
        "--engine", action="store_true", help="run on the real engine with the bundled model (required for now)"
    )
    group.add_argument("--quick", action="store_true", help="a quarter of the requests; the numbers scatter more")
    count_flag(group, "--seed", 0, "of the prompts and their order", minimum=0)
    count_flag(group, "--threads", None, "compute threads (default: one per core)")
    json_flag(group)


def _run(namespace: argparse.Namespace) -> int:
    from quire.bench import report

    if not namespace.engine:
        raise UserError(
            "the figures that need a simulator are not there yet: quire bench paper --engine measures sharing and "
            "waste (Fig. 2 and 15) on the real engine",
            param="engine",
        )
    report.check_writable(namespace.json)
    counts = NUM_REQUESTS_QUICK if namespace.quick else NUM_REQUESTS
    table = rows()
    core = _core(namespace)
    try:
        with report.progress_bar("requests", sum(counts[row.shape.name] for row in table)) as tick:
            usages = _measure(core, table, counts, namespace.seed, tick)
    finally:
        core.shutdown()
    _print(table, usages)
    report.write_json(namespace.json, {"benchmark": "paper", "options": options_json(namespace)} | _json(table, usages))
    return 0


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

    from quire.bench import report

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
        "unit": "percent",
        "sigma": SIGMA,
        "rows": [{name: entry[name] for name in wanted} for entry in measured if entry["paper"] is not None],
        "measured": measured,
    }


PAPER_MODE = Mode(
    summary="the paper's figures about sharing and waste, on the real engine",
    arguments="--engine [options]",
    description=(
        "Run workloads shaped like the paper's on the real engine with the bundled model, and print what sharing saves "
        "and how much memory holds tokens beside the paper's numbers (Fig. 2, Fig. 15)."
    ),
    add_flags=_flags,
    run=_run,
)
