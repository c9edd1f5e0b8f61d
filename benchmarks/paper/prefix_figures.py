"""Fig. 16 and 17: a prefix that all requests share, and a chatbot."""

from __future__ import annotations

from typing import Any

from benchmarks.baselines.systems import ORCA_MAX, ORCA_ORACLE, ORCA_POW2, PAGED
from benchmarks.paper.figure import Figure, Results, Row, Scale
from benchmarks.paper.trials import LIMIT, OFF_THE_CHART, Curve, Load

_SHOTS = {"translation-1shot": ("1-shot, 80 tokens", 1.67), "translation": ("5-shot, 341 tokens", 3.58)}
_CHAT = (ORCA_MAX, ORCA_POW2, ORCA_ORACLE, PAGED)


def _shots(system: str, workload: str, scale: Scale) -> Curve:
    engine = (("enable_prefix_caching", True),) if system == PAGED else ()
    return Curve(Load("llama-13b", system, workload, engine=engine), scale.seconds[workload], scale.fractions)


def _figure16_trials(scale: Scale) -> list[Curve]:
    return [_shots(system, workload, scale) for workload in _SHOTS for system in (PAGED, ORCA_ORACLE)]


def _figure16(results: Results, scale: Scale) -> list[Row]:
    return [
        Row(
            "Fig. 16",
            f"rate over that of {ORCA_ORACLE}, {what}",
            results.sustained(_shots(PAGED, workload, scale)) / results.sustained(_shots(ORCA_ORACLE, workload, scale)),
            paper,
            why="lengths of the sentences are assumed: those of WMT16 in its own tokens are not given",
        )
        for workload, (what, paper) in _SHOTS.items()
    ]


def _chat(system: str, scale: Scale) -> Curve:
    return Curve(Load("opt-13b", system, "chat"), scale.seconds["chat"], scale.fractions)


def _figure17_trials(scale: Scale) -> list[Curve]:
    return [_chat(system, scale) for system in _CHAT]


def _figure17(results: Results, scale: Scale) -> list[Row]:
    ours = results.sustained(_chat(PAGED, scale))
    why = (
        "a request holds some 1,250 slots, so 12 run instead of 7; their keys and values take longer to read, and each "
        "prompt takes all systems 0.1 s: twice the rate needs shorter answers than ShareGPT's first ones, assumed here"
    )
    return [
        Row(
            "Fig. 17",
            f"chatbot, rate over that of {system}",
            ours / results.sustained(_chat(system, scale)),
            2.0,
            why=why,
        )
        for system in _CHAT
        if system != PAGED
    ]


def _plot_curves(axes: Any, curves: dict[str, Curve], results: Results, title: str) -> None:
    for label, curve in curves.items():
        axes.plot(*zip(*results.rates(curve).points, strict=True), marker="o", markersize=3, label=label)
    axes.axhline(LIMIT, color="grey", linewidth=0.5)
    axes.set_ylim(0, OFF_THE_CHART)
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel("requests/s")
    axes.set_ylabel("s per output token")
    axes.legend(fontsize="small")


def _plot_figure16(figure: Any, results: Results, scale: Scale) -> None:
    figure.set_size_inches(10, 4)
    for axes, (workload, (what, _)) in zip(figure.subplots(1, 2), _SHOTS.items(), strict=True):
        curves = {system: _shots(system, workload, scale) for system in (ORCA_ORACLE, PAGED)}
        _plot_curves(axes, curves, results, f"LLaMA-13B, {what}")


def _plot_figure17(figure: Any, results: Results, scale: Scale) -> None:
    curves = {system: _chat(system, scale) for system in _CHAT}
    _plot_curves(figure.subplots(), curves, results, "OPT-13B, chatbot")


PREFIX_FIGURES = (
    Figure("fig16", "Fig. 16: shared prefix, LLaMA-13B", _figure16, _figure16_trials, _plot_figure16),
    Figure("fig17", "Fig. 17: chatbot, OPT-13B", _figure17, _figure17_trials, _plot_figure17),
)
