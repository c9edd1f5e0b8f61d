from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from quire.bench.metrics import METRIC_NAMES, Distribution, ServingReport
from quire.errors import UserError
from quire.utils.progress import ProgressBar
from quire.version import __version__

MILLISECONDS = 1000.0
PIPE_WIDTH = 160


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar on standard error during the block; the returned function counts one more of `total`."""
    num_done = 0
    with ProgressBar(title, total) as bar:

        def tick() -> None:
            nonlocal num_done
            num_done += 1
            bar.update(num_done)

        yield tick


def console() -> Console:
    """Console of tables on stdout. Files and pipes get lines of a fixed width, so nothing is cut."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=PIPE_WIDTH)


def print_rows(title: str, rows: Sequence[tuple[str, str]]) -> None:
    table = Table(show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    for name, value in rows:
        table.add_row(name, value)
    console().print(title, style="table.title", markup=False, highlight=False)  # rich cuts a table's title to its width
    console().print(table)


def print_distributions(title: str, distributions: Mapping[str, Distribution | None], *, factor: float) -> None:
    """Print a row per quantity and a column per statistic, all times `factor`."""
    scaled = {name: entry.scaled(factor) for name, entry in distributions.items() if entry is not None}
    if not scaled:
        return
    table = Table(title=title, title_justify="left")
    table.add_column("")
    columns = list(next(iter(scaled.values())))
    for column in columns:
        table.add_column(column, justify="right")
    for name, values in scaled.items():
        table.add_row(name, *(f"{values[column]:,.2f}" for column in columns))
    console().print(table)


def print_serving_report(report: ServingReport, metrics: Sequence[str], *, title: str) -> None:
    rows = [
        ("requests completed", f"{report.num_completed:,} of {report.num_requests:,}"),
        ("duration", f"{report.duration:,.2f} s"),
        ("prompt tokens", f"{report.num_prompt_tokens:,}"),
        ("output tokens", f"{report.num_output_tokens:,}"),
        ("request throughput", f"{report.rate(report.num_completed):,.2f} requests/s"),
        ("output throughput", f"{report.rate(report.num_output_tokens):,.2f} tokens/s"),
        ("total throughput", f"{report.rate(report.num_prompt_tokens + report.num_output_tokens):,.2f} tokens/s"),
    ]
    if report.num_good is not None:
        rows.append(("goodput", f"{report.rate(report.num_good):,.2f} requests/s ({report.num_good:,} good)"))
    rows.append(("longest wait before sending", f"{report.max_send_delay * MILLISECONDS:,.2f} ms"))
    rows += [(f"failed: {reason}", f"{count:,}") for reason, count in report.failures.items()]
    print_rows(title, rows)
    chosen = {f"{METRIC_NAMES[name]} ({name})": report.latencies[name] for name in metrics}
    print_distributions("Latency in milliseconds", chosen, factor=MILLISECONDS)


def serving_json(report: ServingReport, metrics: Sequence[str]) -> dict[str, Any]:
    """Report as plain data: seconds, tokens, rates per second; latencies in milliseconds."""
    total_tokens = report.num_prompt_tokens + report.num_output_tokens
    return {
        "duration": report.duration,
        "num_requests": report.num_requests,
        "num_completed": report.num_completed,
        "num_failed": report.num_failed,
        "failures": dict(report.failures),
        "num_prompt_tokens": report.num_prompt_tokens,
        "num_output_tokens": report.num_output_tokens,
        "request_throughput": report.rate(report.num_completed),
        "output_throughput": report.rate(report.num_output_tokens),
        "total_token_throughput": report.rate(total_tokens),
        "num_good": report.num_good,
        "request_goodput": None if report.num_good is None else report.rate(report.num_good),
        "max_send_delay_ms": report.max_send_delay * MILLISECONDS,
        **{f"{name}_ms": distribution_json(report.latencies[name], MILLISECONDS) for name in metrics},
    }


def distribution_json(distribution: Distribution | None, factor: float) -> dict[str, float] | None:
    return None if distribution is None else {"count": distribution.count, **distribution.scaled(factor)}


def environment() -> dict[str, Any]:
    """Facts on versions and machine that a result file needs for comparison."""
    return {
        "quire": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
        "num_cpus": os.cpu_count(),
    }


def check_writable(path: Path | None, *, param: str = "json") -> None:
    """Raise UserError before a long run if the result could not be written."""
    if path is None:
        return
    try:
        existed = path.exists()
        with path.open("a", encoding="utf-8"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise UserError(f"cannot write {str(path)!r}: {error.strerror}", param=param) from None


def write_json(path: Path | None, result: Mapping[str, Any]) -> None:
    """Write `result` and the environment, if a path is given; print the path on stderr."""
    if path is None:
        return
    text = json.dumps({"environment": environment(), **result}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
    print(f"wrote {path}", file=sys.stderr)
