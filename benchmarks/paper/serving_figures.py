"""Fig. 12 and 13: latency against rate, and how many requests run side by side, in basic sampling."""

from __future__ import annotations

from typing import Any

from benchmarks.baselines.systems import (
    FASTER_TRANSFORMER,
    ORCA_MAX,
    ORCA_ORACLE,
    ORCA_POW2,
    PAGED,
)
from benchmarks.paper.figure import Figure, Results, Row, Scale, worst_and_best
from benchmarks.paper.servers import SERVERS
from benchmarks.paper.trials import LIMIT, OFF_THE_CHART, Curve, Load, Window

MODELS = ("opt-13b", "opt-66b", "opt-175b")
WORKLOADS = ("sharegpt", "alpaca")
COMPARED = (FASTER_TRANSFORMER, ORCA_MAX, ORCA_POW2, ORCA_ORACLE, PAGED)
SHAREGPT_RATE, ALPACA_RATE = 2.0, 30.0
"""Requests per second of Fig. 13."""
_LARGE = (
    "OPT-175B has room for 125 requests: their attention, and the host's 0.3 ms for each, which is from OPT-13B's "
    "batches, make a step 103 ms; with the 29 of Orca (Max) it is 49 ms"
)
_MEMORY = (
    "paging lets 2.5 times Orca (Oracle)'s and 4.6 times Orca (Max)'s requests run (Fig. 13a), and a larger batch "
    "takes longer: memory alone explains no more"
)
_BATCH = "22 times less than some 2 requests/s would be batches of 7 that take 75 s; those here end after 23 s"
_STEEP = "close to what is sustained a batch grows steeply with each ms of a step"


def curve(model: str, system: str, workload: str, scale: Scale) -> Curve:
    """Latency against rate in basic sampling."""
    return Curve(Load(model, system, workload), scale.seconds[workload], scale.fractions)


def _figure12_trials(scale: Scale) -> list[Curve]:
    return [curve(model, system, "sharegpt", scale) for model in MODELS for system in COMPARED]


def _figure12_drawn(scale: Scale) -> list[Curve]:
    return [curve(model, system, "alpaca", scale) for model in MODELS for system in COMPARED]


def ratios(results: Results, scale: Scale, system: str, workload: str) -> dict[str, float]:
    """Model -> how many times the rate of `system` the paged engine sustains."""
    return {
        model: results.sustained(curve(model, PAGED, workload, scale))
        / results.sustained(curve(model, system, workload, scale))
        for model in MODELS
    }


def _figure12(results: Results, scale: Scale) -> list[Row]:
    oracle = worst_and_best(list(ratios(results, scale, ORCA_ORACLE, "sharegpt").values()))
    most = worst_and_best(list(ratios(results, scale, ORCA_MAX, "sharegpt").values()))
    batch = worst_and_best(list(ratios(results, scale, FASTER_TRANSFORMER, "sharegpt").values()))
    name = "rate sustained on ShareGPT over that of"
    return [
        Row("Fig. 12", f"{name} {ORCA_ORACLE}, least of three models", oracle[0], 1.7, why=_LARGE),
        Row("Fig. 12", f"{name} {ORCA_ORACLE}, most", oracle[1], 2.7, why=_MEMORY),
        Row("Fig. 12", f"{name} {ORCA_MAX}, least of three models", most[0], 2.7, why=_LARGE),
        Row("Fig. 12", f"{name} {ORCA_MAX}, most", most[1], 8.0, why=_MEMORY),
        Row("Fig. 12", f"{name} {FASTER_TRANSFORMER}, most", batch[1], 22.0, why=_BATCH),
    ]


def _plot_figure12(figure: Any, results: Results, scale: Scale) -> None:
    figure.set_size_inches(12, 7)
    grid = figure.subplots(len(WORKLOADS), len(MODELS))
    for row, work in enumerate(WORKLOADS):
        for column, model in enumerate(MODELS):
            axes = grid[row][column]
            for system in COMPARED:
                points = results.rates(curve(model, system, work, scale)).points
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=system)
            axes.axhline(LIMIT, color="grey", linewidth=0.5)
            axes.set_ylim(0, OFF_THE_CHART)
            axes.set_title(f"{SERVERS[model].title}, {work}", fontsize="medium")
            axes.set_xlabel("requests/s")
            axes.set_ylabel("s per output token")
    grid[0][0].legend(fontsize="small")


# -- Fig. 13 -------------------------------------------------------------------------------------------------------

_FIG13A = {ORCA_MAX: 7.0, ORCA_POW2: 9.8, ORCA_ORACLE: 13.6, PAGED: 30.4}
_FIG13B = {ORCA_MAX: 7.0, ORCA_POW2: 43.2, ORCA_ORACLE: 72.8, PAGED: 132.4}


def _sharegpt_window(system: str, scale: Scale) -> Window:
    return Window(Load("opt-13b", system, "sharegpt"), SHAREGPT_RATE, scale.window["sharegpt"])


def _alpaca_window(system: str, scale: Scale) -> Window:
    return Window(Load("opt-13b", system, "alpaca"), ALPACA_RATE, scale.window["alpaca"])


def _figure13_trials(scale: Scale) -> list[Window]:
    return [window(system, scale) for window in (_sharegpt_window, _alpaca_window) for system in _FIG13A]


def _figure13(results: Results, scale: Scale) -> list[Row]:
    rows = []
    for part, papers, window in (("13a", _FIG13A, _sharegpt_window), ("13b", _FIG13B, _alpaca_window)):
        what = "ShareGPT at 2/s" if part == "13a" else "Alpaca at 30/s"
        found = {system: results.usage(window(system, scale)).mean_running for system in papers}
        for system, paper in papers.items():
            rows.append(
                Row(f"Fig. {part}", f"{what}: requests in the batch, {system}", found[system], paper, "", _STEEP)
            )
        if part == "13a":
            rows.append(Row("Fig. 13a", f"{what}: over {ORCA_ORACLE}", found[PAGED] / found[ORCA_ORACLE], 2.2))
            rows.append(Row("Fig. 13a", f"{what}: over {ORCA_MAX}", found[PAGED] / found[ORCA_MAX], 4.3))
    return rows


def _plot_figure13(figure: Any, results: Results, scale: Scale) -> None:
    figure.set_size_inches(10, 4)
    grid = figure.subplots(1, 2)
    parts = (("ShareGPT, 2 requests/s", _FIG13A, _sharegpt_window), ("Alpaca, 30 requests/s", _FIG13B, _alpaca_window))
    for axes, (title, papers, window) in zip(grid, parts, strict=True):
        places = range(len(papers))
        found = [results.usage(window(system, scale)).mean_running for system in papers]
        axes.bar([place - 0.2 for place in places], found, 0.4, label="ours")
        axes.bar([place + 0.2 for place in places], list(papers.values()), 0.4, label="paper")
        axes.set_xticks(list(places), list(papers), fontsize="small")
        axes.set_title(title)
        axes.set_ylabel("requests in the batch")
        axes.legend()


SERVING_FIGURES = (
    Figure(
        "fig12",
        "Fig. 12: latency against rate, basic sampling",
        _figure12,
        _figure12_trials,
        _plot_figure12,
        _figure12_drawn,
        f"Sustained: the mean normalised latency stays below {LIMIT:g} s per output token, the same for all systems.",
    ),
    Figure("fig13", "Fig. 13: requests in the batch, OPT-13B", _figure13, _figure13_trials, _plot_figure13),
)
