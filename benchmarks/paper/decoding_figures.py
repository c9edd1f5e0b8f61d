"""Fig. 14 and 15, and the slides' speed-ups: parallel sampling and beam search."""

from __future__ import annotations

from typing import Any

from benchmarks.baselines.systems import ORCA_ORACLE, ORCA_POW2, PAGED
from benchmarks.paper.figure import Figure, Results, Row, Scale
from benchmarks.paper.trials import Curve, Load, Window

WIDTHS = (2, 4, 6)
SYSTEMS_14 = (ORCA_POW2, ORCA_ORACLE, PAGED)
DECODINGS: tuple[tuple[str, int, int], ...] = (
    ("basic sampling", 1, 0),
    *((f"parallel sampling of {width}", width, 0) for width in WIDTHS),
    *((f"beam width {width}", 1, width) for width in WIDTHS),
)
_RATE_15 = {"alpaca": 2.0, "sharegpt": 0.3}
_REQUESTS_15 = 15
"""One in this number of a window's requests: the share that sharing saves does not depend on how many run."""


def _curve(system: str, n: int, width: int, scale: Scale) -> Curve:
    fractions = scale.fractions if (n, width) == (1, 0) else (0.9, 1.05)
    # A search of width 6 makes the plans of six sequences: a third of the time is as many of them.
    seconds = scale.seconds["alpaca"] * (0.5 if width or n > 1 else 1)
    return Curve(Load("opt-13b", system, "alpaca", n=n, beam_width=width), seconds, fractions)


def _figure14_trials(scale: Scale) -> list[Curve]:
    return [_curve(system, n, width, scale) for _, n, width in DECODINGS if n == 1 for system in SYSTEMS_14]


def _figure14_drawn(scale: Scale) -> list[Curve]:
    return [_curve(system, n, width, scale) for _, n, width in DECODINGS if n > 1 for system in SYSTEMS_14]


def _speed_ups(results: Results, scale: Scale, system: str) -> dict[str, float]:
    return {
        name: results.sustained(_curve(PAGED, n, width, scale)) / results.sustained(_curve(system, n, width, scale))
        for name, n, width in DECODINGS
        if n == 1
    }


_FIG14 = {"basic sampling": 1.3, "beam width 6": 2.3}
_SLIDES = {"basic sampling": 1.8, "beam width 2": 2.4, "beam width 4": 3.2, "beam width 6": 3.5}
_SPREAD = "what a reservation loses depends on the spread of Alpaca's lengths, which is assumed"


def _figure14(results: Results, scale: Scale) -> list[Row]:
    rows = []
    for figure, system, papers in (("Fig. 14", ORCA_ORACLE, _FIG14), ("slides", ORCA_POW2, _SLIDES)):
        found = _speed_ups(results, scale, system)
        rows += [
            Row(figure, f"rate over that of {system}, {name}", found[name], paper, why=_SPREAD)
            for name, paper in papers.items()
        ]
    return rows


def _plot_figure14(figure: Any, results: Results, scale: Scale) -> None:
    figure.set_size_inches(10, 4)
    axes = figure.subplots()
    names = [name for name, _, _ in DECODINGS]
    for system in SYSTEMS_14:
        rates = [results.sustained(_curve(system, n, width, scale)) for _, n, width in DECODINGS]
        axes.plot(names, rates, marker="o", label=system)
    axes.tick_params(axis="x", labelrotation=20, labelsize="small")
    axes.set_ylabel("sustained requests/s, OPT-13B, Alpaca")
    axes.legend()


# -- Fig. 15 -------------------------------------------------------------------------------------------------------

_BANDS = {
    ("alpaca", "parallel sampling"): (6.1, 9.8),
    ("alpaca", "beam"): (37.6, 55.2),
    ("sharegpt", "parallel sampling"): (16.2, 30.5),
    ("sharegpt", "beam"): (44.3, 66.3),
}
_SCORES = "how often beams part depends on the model; here gaps between scores are drawn, --engine has a real model's"


def _window(workload: str, kind: str, width: int, scale: Scale) -> Window:
    n, beam_width = (1, width) if kind == "beam" else (width, 0)
    num_requests = max(8, scale.window[workload] // _REQUESTS_15)
    return Window(Load("opt-13b", PAGED, workload, n=n, beam_width=beam_width), _RATE_15[workload], num_requests)


def _figure15_trials(scale: Scale) -> list[Window]:
    return [_window(workload, kind, width, scale) for workload, kind in _BANDS for width in (WIDTHS[0], WIDTHS[-1])]


def _figure15_drawn(scale: Scale) -> list[Window]:
    return [_window(workload, kind, WIDTHS[1], scale) for workload, kind in _BANDS]


def _figure15(results: Results, scale: Scale) -> list[Row]:
    rows = []
    for (workload, kind), band in _BANDS.items():
        for width, paper in zip((WIDTHS[0], WIDTHS[-1]), band, strict=True):
            saved = 100 * results.usage(_window(workload, kind, width, scale)).saved
            why = _SCORES if kind == "beam" else "the paper's lengths are not known beside their means"
            rows.append(Row("Fig. 15", f"blocks saved, {workload}, {kind} of {width}", saved, paper, "%", why))
    return rows


def _plot_figure15(figure: Any, results: Results, scale: Scale) -> None:
    figure.set_size_inches(10, 4)
    grid = figure.subplots(1, 2)
    for axes, kind in zip(grid, ("parallel sampling", "beam"), strict=True):
        for workload in ("alpaca", "sharegpt"):
            saved = [100 * results.usage(_window(workload, kind, width, scale)).saved for width in WIDTHS]
            [line] = axes.plot(WIDTHS, saved, marker="o", label=f"{workload}, ours")
            band = _BANDS[workload, kind]
            axes.plot((WIDTHS[0], WIDTHS[-1]), band, "--", color=line.get_color(), label=f"{workload}, paper's ends")
        axes.set_title(kind)
        axes.set_xlabel("sequences")
        axes.set_ylabel("% of blocks saved")
        axes.legend(fontsize="small")


DECODING_FIGURES = (
    Figure(
        "fig14",
        "Fig. 14 and slides: parallel sampling and beam search, OPT-13B, Alpaca",
        _figure14,
        _figure14_trials,
        _plot_figure14,
        _figure14_drawn,
    ),
    Figure(
        "fig15",
        "Fig. 15: memory saved by sharing, OPT-13B",
        _figure15,
        _figure15_trials,
        _plot_figure15,
        _figure15_drawn,
    ),
)
