"""The simulated figures: what a trial measures, on small runs; what figures make of it, on made-up results."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.baselines.systems import ORCA_MAX, PAGED, SYSTEMS
from benchmarks.paper.block_figures import preemption_seconds
from benchmarks.paper.figure import FULL, QUICK, Results, Row, Trial
from benchmarks.paper.kernel_timing import KernelTiming
from benchmarks.paper.launches import EAGER, PIECEWISE, decode, step_seconds
from benchmarks.paper.launches import FULL as FULL_GRAPH
from benchmarks.paper.run import FIGURES, plot, ratio, run_trials, verdict
from benchmarks.paper.servers import HOST_OVERHEAD, HOST_OVERHEAD_PER_REQUEST, SERVERS
from benchmarks.paper.trials import LIMIT, Curve, Load, Rates, Usage, Window
from quire.simulator.cost import CostModel
from quire.simulator.hardware import find
from quire.simulator.replica import Observer, simulate
from quire.simulator.shape import find_shape
from quire.simulator.trace import TraceRequest

# Numbers of the paper, by figure.
NUM_ROWS = {
    "table1": 9, "fig1": 4, "fig2": 4, "fig11": 4, "fig12": 5, "fig13": 10, "fig14": 6, "fig15": 8, "fig16": 2,
    "fig17": 3, "fig18b": 4, "fig19": 4, "fig18a": 2, "graphs": 4, "slides": 7,
}  # fmt: skip


def made_up() -> Results:
    found: dict[Trial, object] = {}
    for figure in FIGURES:
        for trial in (*figure.trials(FULL), *figure.drawn(FULL)):
            if isinstance(trial, KernelTiming):
                found[trial] = 0.1
                continue
            place = 1 + list(SYSTEMS).index(trial.load.system)
            if isinstance(trial, Curve):
                found[trial] = Rates(float(place), [(0.9 * place, 0.5 * LIMIT), (1.1 * place, 2 * LIMIT)])
            else:
                found[trial] = Usage(10.0 * place, 0.1, 0.1 * place, 0.1, 0.1, 0.05 * place, 0, 100)
    return Results(found)


@pytest.mark.parametrize("system", list(SYSTEMS))
def test_one_request_alone_takes_its_steps(system: str) -> None:
    """A prompt's step and a step for each further token, with no other request there; the same on every system."""
    server = SERVERS["opt-13b"]
    metrics = Load("opt-13b", system, "sharegpt").replica(Observer()).serve_trace([TraceRequest(0.0, 100, 20)])
    expected = simulate([TraceRequest(0.0, 100, 20)], server.cost(), server.settings())
    assert metrics.num_steps == 20
    assert metrics.end == pytest.approx(expected.end)
    assert metrics.end > 20 * (HOST_OVERHEAD + HOST_OVERHEAD_PER_REQUEST)


def test_a_window_holds_what_memory_allows() -> None:
    """15.7 K slots: seven regions of 2,048. Paged, as many requests as have tokens."""
    most = Window(Load("opt-13b", ORCA_MAX, "sharegpt"), 4.0, 120)()
    paged = Window(Load("opt-13b", PAGED, "sharegpt"), 4.0, 200)()
    assert 6.8 < most.mean_running <= 7
    assert paged.mean_running > 3 * most.mean_running
    assert most.stored + most.reserved + most.wasted == pytest.approx(7 * 2048 / (982 * 16), abs=0.02)
    assert paged.wasted < 0.05
    assert paged.stored > 0.8
    assert most.saved == 0


def test_parallel_samples_share_their_prompt() -> None:
    usage = Window(Load("opt-13b", PAGED, "sharegpt", n=4), 0.3, 12)()
    assert 0.1 < usage.saved < 0.5


def test_a_curve_finds_the_rate_between_two() -> None:
    found = Curve(Load("opt-13b", ORCA_MAX, "sharegpt"), 60.0, (0.8, 1.6))()
    latencies = dict(found.points)
    below = [rate for rate in latencies if latencies[rate] <= LIMIT]
    assert below
    assert max(latencies) > found.sustained > min(latencies)


def test_swapping_small_blocks_costs_and_recomputing_does_not_care() -> None:
    swapped = {size: preemption_seconds(size)[0] for size in (1, 16, 256)}
    assert swapped[1] > 5 * swapped[16] > 5 * swapped[256]
    assert len({preemption_seconds(size)[1] for size in (1, 16, 256)}) == 1


def test_graphs_gain_where_the_host_is_slower_than_the_device() -> None:
    cost = CostModel(find_shape("llama-3-8b"), find("h100"))
    steps = [step_seconds(cost, decode(batch, 512)) for batch in (1, 256)]
    device = cost.step_seconds(decode(256, 512))
    assert steps[0][EAGER] > 1.2 * steps[0][PIECEWISE] > 1.2 * steps[0][FULL_GRAPH]
    assert steps[1][EAGER] == device
    assert device < steps[1][FULL_GRAPH] < steps[1][PIECEWISE] < 1.02 * device


def test_the_kernel_is_timed_over_both_kinds_of_memory() -> None:
    """Not how long it takes; that both compute the same is checked there."""
    assert KernelTiming(2, 64)() > -1


def test_every_number_of_the_paper_has_a_row() -> None:
    results = made_up()
    tables = {figure.name: figure.rows(results, FULL) for figure in FIGURES}
    assert {name: len(rows) for name, rows in tables.items()} == NUM_ROWS
    rows = [row for table in tables.values() for row in table]
    assert all(math.isfinite(row.ours) and math.isfinite(row.paper) for row in rows)
    assert len({(row.figure, row.quantity) for row in rows}) == len(rows)


def test_rows_are_made_of_the_trials_that_they_name() -> None:
    results = made_up()
    rows = {row.quantity: row for figure in FIGURES for row in figure.rows(results, FULL)}
    places = {name: 1 + number for number, name in enumerate(SYSTEMS)}
    most = rows["rate sustained on ShareGPT over that of FasterTransformer, most"]
    assert most.ours == pytest.approx(places[PAGED] / places["FasterTransformer"])
    assert rows["ShareGPT at 2/s: over Orca (Max)"].ours == pytest.approx(places[PAGED] / places[ORCA_MAX])
    assert rows["KV memory that holds token states, Orca (Max)"].ours == pytest.approx(10 * places[ORCA_MAX])
    assert rows["blocks saved, alpaca, parallel sampling of 2"].ours == pytest.approx(5 * places[PAGED])


def test_what_counts_as_near() -> None:
    assert Row("f", "q", 2.3, 2.0).is_near
    assert not Row("f", "q", 2.5, 2.0).is_near
    assert Row("f", "q", 5.9, 3.0, "%").is_near
    assert not Row("f", "q", 26.1, 20.0, "%").is_near
    assert Row("f", "q", 0.1, 2.0, at_most=True).is_near
    assert Row("f", "q", -1.0, 2.0, "%", at_most=True).is_near
    assert not Row("f", "q", 2.5, 2.0, at_most=True).is_near
    off = Row("f", "q", 3.0, 2.0, why="a reason")
    assert (ratio(off), verdict(off)) == ("1.50", "off: a reason")
    assert verdict(Row("f", "q", 2.0, 2.0, why="a reason")) == ""
    assert ratio(Row("f", "q", 0.5, 0.0, "%")) == "+0.5"


def test_trials_run_once_and_in_this_process_when_asked() -> None:
    figures = [figure for figure in FIGURES if figure.name == "fig2"]
    results = run_trials(figures, QUICK, 1)
    [row] = [row for row in figures[0].rows(results, QUICK) if row.quantity.endswith("Orca (Max)")]
    assert row.ours == pytest.approx(20.4, abs=5)


@pytest.mark.long
def test_plots(tmp_path: Path) -> None:
    results = made_up()
    drawn = [plot(figure, results, FULL, tmp_path) for figure in FIGURES]
    assert [path.name for path in drawn if path is not None] == [
        f"{figure.name}.png" for figure in FIGURES if figure.plot is not None
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn if path is not None)
