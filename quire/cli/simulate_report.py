"""Output of `quire simulate`, by question: tables, files and plots."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from quire.cli import report
from quire.cli.bench_mode import options_json
from quire.config.parallel import ParallelConfig
from quire.errors import UserError
from quire.simulator import plots
from quire.simulator import rates as rates_module
from quire.simulator import sweep as sweep_module
from quire.simulator.exchange import ELEMENT_BYTES, RankTraffic, exchange_of
from quire.simulator.metrics import LATENCIES, PERCENTILES, Metrics
from quire.simulator.scenario import Scenario
from quire.utils.sizes import format_bytes

MILLISECONDS = 1e3
NAMES = {
    "ttft": "time to first token",
    "loading_ttft": "where its adapter was in no slot",
    "tpot": "time per output token",
    "latency": "latency",
    "normalized_latency": "normalised latency (per output token)",
}


def prepare_plots(directory: Path) -> None:
    """Raise UserError before a long run if plots cannot be written."""
    plots.check_matplotlib()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {str(directory)!r}: {error.strerror}", param="plot") from None


def run(scenario: Scenario, namespace: argparse.Namespace) -> int:
    metrics = scenario.simulate(namespace.rate, num_processes=namespace.processes)
    _check_objectives(scenario, metrics)
    _print_run(scenario, metrics)
    _write(namespace, scenario, {"result": _json(scenario, metrics)})
    if namespace.plot is not None:
        plots.plot_memory(namespace.plot / "memory.png", metrics, title=_title(scenario))
    return 0 if metrics.num_finished else 1


def rates(scenario: Scenario, namespace: argparse.Namespace) -> int:
    asked = _parse_rates(namespace.rates)
    runs: dict[float, Metrics] = {}
    num_processes = namespace.processes
    found: Iterator[Metrics]
    with report.progress_bar("rates", len(asked)) as tick:
        if scenario.cost.layout.dp > 1:  # the replicas of a rate share the processes
            found = map(partial(scenario.simulate, num_processes=num_processes), asked)
        else:
            found = sweep_module.side_by_side(scenario.simulate, asked, num_processes)
        for rate, metrics in zip(asked, found, strict=True):
            _check_objectives(scenario, metrics)
            runs[rate] = metrics
            tick()
    _print_rates(scenario, runs)
    _write(namespace, scenario, {"rates": [{"rate": rate, **_json(scenario, runs[rate])} for rate in asked]})
    _plot_rates(scenario, runs, namespace.plot)
    return 0


def find_rate(scenario: Scenario, namespace: argparse.Namespace) -> int:
    with report.progress_bar("rates tried", 0) as tick:

        def run_at(rate: float) -> Metrics:
            metrics = scenario.simulate(rate, num_processes=namespace.processes)
            tick()
            return metrics

        found = rates_module.find_rate(run_at, scenario.holds, start=namespace.rate or 1.0)
    _check_objectives(scenario, found.metrics)
    runs = {trial.rate: trial.metrics for trial in found.trials}
    _print_rates(scenario, dict(sorted(runs.items())))
    per_device = found.rate / scenario.cost.layout.num_devices
    print(f"highest rate that holds: {found.rate:.3g} requests/s ({per_device:.3g} on each device)")
    trials = [{"rate": each.rate, "holds": each.holds, **_json(scenario, each.metrics)} for each in found.trials]
    _write(namespace, scenario, {"rate": found.rate, "rate_per_device": per_device, "trials": trials})
    _plot_rates(scenario, runs, namespace.plot)
    return 0


def sweep(scenario: Scenario, namespace: argparse.Namespace) -> int:
    num_devices = scenario.cost.layout.num_devices if namespace.gpus is None else namespace.gpus
    candidates = sweep_module.layouts(scenario, num_devices)
    results = sweep_module.sweep(scenario, candidates, num_processes=namespace.processes)
    front = sweep_module.pareto_front([point for result in results for point in result.points])
    table = Table(title=f"{_devices_title(scenario)}: layouts of {num_devices} devices", title_justify="left")
    columns = [
        "layout",
        "sent a token",
        "and a prompt's",
        "most tokens/s/GPU",
        "at TPOT ms",
        "best 1/TPOT",
        "on the front",
    ]
    if scenario.objectives:
        columns += ["requests/s that hold", "each GPU"]
    for column in columns:
        table.add_column(column, justify="left" if column == "layout" else "right")
    for result in results:
        best = max(result.points, key=lambda point: point.tokens_per_device)
        *sampled, prompt = _exchange(scenario, result.layout)
        row = [
            str(result.layout),
            format_bytes(sum(sampled)),
            format_bytes(prompt) if prompt else "",
            f"{best.tokens_per_device:,.0f}",
            f"{best.tpot * MILLISECONDS:,.1f}",
            f"{max(point.interactivity for point in result.points):,.1f}",
            str(sum(point in front for point in result.points)),
        ]
        if scenario.objectives:
            rate = result.found_rate
            if rate is None:
                row += ["none", ""]
            elif math.isinf(rate):
                row += ["all", ""]
            else:
                row += [f"{rate:,.3g}", f"{rate / num_devices:,.3g}"]
        table.add_row(*row)
    report.console().print(table)
    _write(namespace, scenario, {"layouts": [_layout_json(scenario, result, front) for result in results]})
    if namespace.plot is not None:
        plots.plot_pareto(namespace.plot / "pareto.png", results, title=_devices_title(scenario))
    return 0


def _exchange(scenario: Scenario, layout: ParallelConfig) -> RankTraffic:
    size = ELEMENT_BYTES if scenario.cost.hardware.kind == "cpu" else 2
    return exchange_of(scenario.cost.shape, layout, size)


# -- tables -----------------------------------------------------------------------------------------------------------


def _title(scenario: Scenario) -> str:
    return f"{_devices_title(scenario)}, {scenario.cost.layout}"


def _devices_title(scenario: Scenario) -> str:
    return f"{scenario.cost.shape.name} on {scenario.cost.hardware.title}"


def _ignored_priorities(metrics: Metrics) -> list[tuple[str, str]]:
    if not metrics.num_priorities_ignored:
        return []
    return [("priorities ignored", f"{metrics.num_priorities_ignored:,} (they need --scheduling-policy priority)")]


def _adapters(metrics: Metrics) -> list[tuple[str, str]]:
    if not metrics.num_adapted:
        return []
    loads = f"{metrics.stats.adapter_loads_total:,} loads for {metrics.num_adapted:,} requests"
    return [("adapter hits", f"{metrics.adapter_hit_rate:.1%} ({loads})")]


def _accepted(metrics: Metrics) -> list[tuple[str, str]]:
    given, accepted = metrics.stats.draft_tokens_total, metrics.stats.accepted_draft_tokens_total
    return [("drafts accepted", f"{accepted:,} of {given:,}")] if given else []


def _print_run(scenario: Scenario, metrics: Metrics) -> None:
    stats, duration = metrics.stats, metrics.end or math.inf
    blocks = f"{metrics.num_blocks:,} of {scenario.settings.block_size} tokens"
    rows = [
        ("requests finished", f"{metrics.num_finished:,} of {metrics.num_requests:,}"),
        ("requests refused", f"{metrics.num_refused:,}"),
        *_ignored_priorities(metrics),
        ("simulated time", f"{metrics.end:,.1f} s"),
        ("request throughput", f"{metrics.num_finished / duration:,.2f} requests/s"),
        ("output throughput", f"{metrics.num_output_tokens / duration:,.1f} tokens/s"),
        ("total throughput", f"{(metrics.num_input_tokens + metrics.num_output_tokens) / duration:,.1f} tokens/s"),
        ("batched requests, mean", f"{metrics.mean_running:,.1f}"),
        ("KV blocks", blocks),
        ("KV use, mean", f"{metrics.mean_kv_usage:.1%}"),
        ("preemptions", f"{stats.preemptions_total:,} ({stats.swap_preemptions_total:,} swapped)"),
        ("prefix-cache hits", f"{stats.prefix_cache_hits_total:,} tokens"),
        *([("pictures encoded", f"{stats.encoded_images_total:,}")] if stats.encoded_images_total else []),
        *_adapters(metrics),
        *_accepted(metrics),
        ("steps", f"{metrics.num_steps:,}"),
        ("weights on each device", format_bytes(scenario.cost.weight_bytes_per_device)),
    ]
    if scenario.objectives:
        share = metrics.num_slo_met / metrics.num_finished if metrics.num_finished else 0.0
        rows.append(("requests that met all objectives", f"{share:.1%}"))
        rows.append((f"P{scenario.percentile:g} keeps them", "yes" if scenario.holds(metrics) else "no"))
    report.print_rows(_title(scenario), rows)
    table = Table(title="Latency in milliseconds", title_justify="left")
    for column in ("", "mean", *(f"p{percent:g}" for percent in PERCENTILES), "max"):
        table.add_column(column, justify="right" if column else "left")
    for name in LATENCIES:
        found = metrics.latencies[name].as_json()
        if found:
            values = [found["mean"], *(found[f"p{percent:g}"] for percent in PERCENTILES), found["max"]]
            table.add_row(NAMES[name], *(f"{value * MILLISECONDS:,.2f}" for value in values))
    report.console().print(table)


def _print_rates(scenario: Scenario, runs: Mapping[float, Metrics]) -> None:
    table = Table(title=_title(scenario), title_justify="left")
    columns = ["requests/s", "ms/token", "TTFT p99 ms", "TPOT p99 ms", "tokens/s", "batched", "KV use", "preempted"]
    for column in [*columns, *(["holds"] if scenario.objectives else [])]:
        table.add_column(column, justify="right")
    for rate, metrics in runs.items():
        latencies = metrics.latencies
        row = [
            f"{rate:.3g}",
            _milliseconds(latencies["normalized_latency"].mean, 2),
            _milliseconds(latencies["ttft"].percentile(99), 1),
            _milliseconds(latencies["tpot"].percentile(99), 2),
            f"{metrics.num_output_tokens / metrics.end if metrics.end else 0:,.0f}",
            f"{metrics.mean_running:,.1f}",
            f"{metrics.mean_kv_usage:.1%}",
            f"{metrics.stats.preemptions_total:,}",
        ]
        if scenario.objectives:
            row.append("yes" if scenario.holds(metrics) else "no")
        table.add_row(*row)
    report.console().print(table)


def _milliseconds(seconds: float, digits: int) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * MILLISECONDS:,.{digits}f}"


def _check_objectives(scenario: Scenario, metrics: Metrics) -> None:
    for name in scenario.objectives:
        if metrics.num_finished and not metrics.latencies[name].count:
            raise UserError(f"--slo {name}: no request has one, being a single token or a beam search", param="slo")


# -- files ------------------------------------------------------------------------------------------------------------


def _json(scenario: Scenario, metrics: Metrics) -> dict[str, Any]:
    entry = metrics.as_json()
    if scenario.objectives:
        entry["holds"] = scenario.holds(metrics)
    return entry | {"series": metrics.series.rows(metrics.num_blocks)}


def _layout_json(
    scenario: Scenario, result: sweep_module.SweepResult, front: list[sweep_module.Point]
) -> dict[str, Any]:
    points = [
        {
            "rate": point.rate,
            "tpot": point.tpot,
            "ttft": point.ttft,
            "tokens_per_second": point.tokens_per_second,
            "tokens_per_device": point.tokens_per_device,
            "on_front": point in front,
        }
        for point in result.points
    ]
    rate = result.found_rate
    is_bounded = rate is None or math.isfinite(rate)
    return {
        "layout": asdict(result.layout),
        "exchanged_bytes_per_token": _exchange(scenario, result.layout)._asdict(),
        "points": points,
        "rate": rate if is_bounded else None,
        "every_rate_holds": not is_bounded,
    }


def _write(namespace: argparse.Namespace, scenario: Scenario, result: dict[str, Any]) -> None:
    what = {
        "model": scenario.cost.shape.name,
        "gpu": scenario.cost.hardware.name,
        "layout": asdict(scenario.cost.layout),
    }
    report.write_json(
        namespace.json, {"benchmark": "simulate", "options": options_json(namespace), "simulated": what} | result
    )


def _plot_rates(scenario: Scenario, runs: Mapping[float, Metrics], directory: Path | None) -> None:
    if directory is not None:
        plots.plot_latency(directory / "latency.png", runs, title=_title(scenario))


def _parse_rates(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < rate < float("inf") for rate in found):
        raise UserError(f"--rates: expected numbers above 0 with commas between them, not {text!r}", param="rates")
    return found
