"""PNG plots with matplotlib, an optional dependency (extra `bench`) that is imported here only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.errors import UserError
from quire.simulator.metrics import Metrics
from quire.simulator.sweep import SweepResult, pareto_front
from quire.utils.extras import how_to_install

WIDTH, HEIGHT, DOTS = 7.0, 4.0, 150
"""Inches, and dots per inch."""
MILLISECONDS = 1e3
LOGARITHMIC_FROM = 20
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""


def check_matplotlib() -> None:
    """Raise UserError before a long run if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(f"plots need matplotlib: {how_to_install('bench')}", param="plot") from None


@contextmanager
def figure(path: Path, *, rows: int = 1, title: str = "") -> Iterator[list[Any]]:
    """Axes of a PNG figure written to `path` when the block ends, one below the other. Raises UserError when matplotlib
    is missing or the file cannot be written."""
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(WIDTH, HEIGHT * (1 + 0.6 * (rows - 1))), dpi=DOTS, layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.subplots(rows, 1, sharex=rows > 1, squeeze=False)[:, 0]
    if title:
        drawn.suptitle(title)
    yield list(axes)
    for each in axes:
        each.grid(visible=True, alpha=0.3)
        if each.get_legend_handles_labels()[0]:
            each.legend(fontsize="small")
    try:
        drawn.savefig(path)
    except OSError as error:
        raise UserError(f"cannot write {str(path)!r}: {error.strerror}", param="plot") from None


def plot_latency(path: Path, runs: Mapping[float, Metrics], *, title: str = "") -> None:
    """Plot latencies against request rates. runs: requests per second -> metrics."""
    rates = sorted(runs)
    with figure(path, rows=3, title=title) as axes:
        for axis, name, label in zip(
            axes,
            ("normalized_latency", "ttft", "tpot"),
            ("normalised latency\n(ms/token)", "time to first\ntoken (ms)", "time per output\ntoken (ms)"),
            strict=True,
        ):
            found = [runs[rate].latencies[name] for rate in rates]
            axis.plot(rates, [MILLISECONDS * each.mean for each in found], marker="o", label="mean")
            axis.plot(rates, [MILLISECONDS * each.percentile(99) for each in found], marker="^", label="P99")
            axis.set_ylabel(label)
            _scale(axis)
        axes[-1].set_xlabel("request rate (requests/s)")


def _scale(axis: Any) -> None:
    values = [value for line in axis.get_lines() for value in line.get_ydata() if value > 0]
    if values and max(values) > LOGARITHMIC_FROM * min(values):
        axis.set_yscale("log")
    else:
        axis.set_ylim(0, 1.08 * max(values, default=1.0))  # room for the mark of the highest


def plot_memory(path: Path, metrics: Metrics, *, title: str = "") -> None:
    """Plot the share of KV blocks in use, running and waiting requests, and preemptions over time."""
    rows = metrics.series.rows(metrics.num_blocks)
    times = [row["time"] for row in rows]
    with figure(path, rows=3, title=title) as axes:
        axes[0].fill_between(times, [100 * row["kv_usage"] for row in rows], alpha=0.5)
        axes[0].set_ylim(0, 100)
        axes[0].set_ylabel("KV blocks\nin use (%)")
        axes[1].plot(times, [row["running"] for row in rows], label="running")
        axes[1].plot(times, [row["waiting"] for row in rows], label="waiting")
        axes[1].set_ylabel("requests")
        axes[1].set_ylim(bottom=0)
        axes[2].bar(times, [row["preemptions"] for row in rows], width=metrics.series.width, align="edge")
        axes[2].set_ylabel("preemptions")
        axes[2].set_ylim(0, 1.05 * max([1, *(row["preemptions"] for row in rows)]))
        axes[2].set_xlabel("time (s)")


def plot_pareto(path: Path, results: Sequence[SweepResult], *, title: str = "") -> None:
    """Plot output tokens per second of a device against one user's (1/TPOT), and the Pareto front."""
    with figure(path, title=title) as (axis,):
        for result in results:
            points = [(point.interactivity, point.tokens_per_device) for point in result.points]
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=0.8, label=str(result.layout))
        front = pareto_front([point for result in results for point in result.points])
        axis.plot(
            [point.interactivity for point in front],
            [point.tokens_per_device for point in front],
            color="black",
            linestyle="--",
            label="Pareto front",
        )
        axis.set_xlabel("tokens/s of one user (1/TPOT)")
        axis.set_ylabel("output tokens/s of one GPU")
        axis.set_ylim(bottom=0)
