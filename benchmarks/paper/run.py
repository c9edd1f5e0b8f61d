"""Runs the trials of figures in processes, prints each figure's table, draws its plot."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.baselines.systems import SYSTEMS
from benchmarks.paper.block_figures import BLOCK_FIGURES
from benchmarks.paper.decoding_figures import DECODING_FIGURES
from benchmarks.paper.figure import Figure, Results, Row, Scale, Trial
from benchmarks.paper.kernel_timing import KernelTiming
from benchmarks.paper.memory_figures import MEMORY_FIGURES
from benchmarks.paper.prefix_figures import PREFIX_FIGURES
from benchmarks.paper.serving_figures import SERVING_FIGURES
from benchmarks.paper.slide_figures import SLIDE_FIGURES
from benchmarks.paper.trials import Curve, Window
from quire.cli import report
from quire.errors import UserError
from quire.simulator.plots import check_matplotlib

PLOT_INCHES = (7.0, 4.0)
PLOT_DPI = 120

FIGURES: tuple[Figure, ...] = (
    *MEMORY_FIGURES,
    *SERVING_FIGURES,
    *DECODING_FIGURES,
    *PREFIX_FIGURES,
    *BLOCK_FIGURES,
    *SLIDE_FIGURES,
)


def run_trials(
    figures: Sequence[Figure], scale: Scale, num_processes: int | None = None, *, plots: bool = False
) -> Results:
    """Every trial of the figures once, with a progress bar: what is timed first, by itself, then simulations,
    `num_processes` at a time (None: one for each core). plots: those too that only plots need."""
    wanted = list(dict.fromkeys(trial for figure in figures for trial in figure.trials(scale)))
    if plots:
        wanted = list(dict.fromkeys([*wanted, *(trial for figure in figures for trial in figure.drawn(scale))]))
    timed = [trial for trial in wanted if isinstance(trial, KernelTiming)]
    trials = [trial for trial in wanted if not isinstance(trial, KernelTiming)]
    trials.sort(key=_expected_length, reverse=True)  # so that no long one is left alone at the end
    found: dict[Trial, Any] = {}
    num_processes = min(num_processes or os.cpu_count() or 1, len(trials))
    with report.progress_bar("simulated runs", len(wanted)) as tick:
        for each in timed:  # before the others: the machine is then as quiet as it gets
            found[each] = each()
            tick()
        if num_processes <= 1:
            for trial in trials:
                found[trial] = trial()
                tick()
            return Results(found)
        # Not forked: the program has a thread by now, the progress bar's.
        with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
            running = {pool.submit(trial): trial for trial in trials}
            for future in as_completed(running):
                found[running[future]] = future.result()
                tick()
    return Results(found)


def _expected_length(trial: Window | Curve) -> tuple[bool, int, int]:
    """To sort by: small batches make many steps, and beams make long ones."""
    load = trial.load
    return isinstance(trial, Curve), load.beam_width, -list(SYSTEMS).index(load.system)


def print_table(figure: Figure, rows: Sequence[Row]) -> None:
    """One figure: ours, paper, ratio; and why, where ours is off.

    Without the column of figures where all rows are of one, which the title names, and without an empty last one.
    """
    from rich.table import Table

    table = Table(title=figure.title, title_justify="left", caption=figure.remark or None, caption_justify="left")
    is_mixed = len({row.figure for row in rows}) > 1
    has_verdicts = any(verdict(row) for row in rows)
    if is_mixed:
        table.add_column("figure")
    table.add_column("quantity")
    for column in ("ours", "paper", "ratio"):
        table.add_column(column, justify="right")
    if has_verdicts:
        table.add_column("")
    for row in rows:
        paper = f"at most {number(row.paper)}" if row.at_most else number(row.paper)
        cells = [row.quantity, number(row.ours), paper, ratio(row)]
        table.add_row(*[row.figure] * is_mixed, *cells, *[verdict(row)] * has_verdicts)
    report.console().print(table)


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def ratio(row: Row) -> str:
    return f"{row.ratio:.2f}" if row.paper else f"{row.ours - row.paper:+.1f}"


def verdict(row: Row) -> str:
    """Empty where ours is near the paper's; else why not, as far as known."""
    if row.is_near:
        return ""
    return f"off: {row.why}" if row.why else "off"


def plot(figure: Figure, results: Results, scale: Scale, folder: Path) -> Path | None:
    """Draw a figure into a PNG file of the folder; None for one that has no plot.

    Raises UserError when matplotlib is missing or the file cannot be written.
    """
    if figure.plot is None:
        return None
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Drawing

    path = folder / f"{figure.name}.png"
    drawing = Drawing(figsize=PLOT_INCHES, dpi=PLOT_DPI, layout="constrained")
    FigureCanvasAgg(drawing)
    figure.plot(drawing, results, scale)
    drawing.suptitle(figure.title)
    try:
        drawing.savefig(path)
    except OSError as error:
        raise UserError(f"cannot write {str(path)!r}: {error.strerror}", param="plots") from None
    return path
