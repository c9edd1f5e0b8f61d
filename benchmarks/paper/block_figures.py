"""Fig. 18b and 19: block size, and recomputation against swapping."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.baselines.systems import PAGED
from benchmarks.paper.figure import Figure, Results, Row, Scale
from benchmarks.paper.servers import GIB, SERVERS
from benchmarks.paper.trials import Load, Window
from quire.simulator.replica import Replica
from quire.simulator.work import StepWork

BLOCK_SIZES = (1, 4, 8, 16, 32, 64, 128, 256)
_RATES_18 = {"sharegpt": 1.8, "alpaca": 28.0}
"""Requests per second: nine tenths of what blocks of 16 sustain."""
_GOOD = 1.15
"""A block size is as good as the best one when its latency is at most this factor times the best."""
_EDGE = (
    "the paper gives no rate and no tolerance; sizes are powers of two, so that the next one is off by a factor of two"
)
_REMARK_18 = f"Good: latency at most {_GOOD:g} times the best, at nine tenths of the rate that blocks of 16 sustain."
_PAPERS_18 = {"sharegpt": (16, 128), "alpaca": (16, 32)}


def _blocks(workload: str, block_size: int, scale: Scale) -> Window:
    load = Load("opt-13b", PAGED, workload, engine=(("block_size", block_size),))
    return Window(load, _RATES_18[workload], scale.window[workload] // 2)


def _figure18_trials(scale: Scale) -> list[Window]:
    return [_blocks(workload, size, scale) for workload in _RATES_18 for size in BLOCK_SIZES]


def _latencies(results: Results, scale: Scale, workload: str) -> dict[int, float]:
    return {size: results.usage(_blocks(workload, size, scale)).normalized_latency for size in BLOCK_SIZES}


def _figure18(results: Results, scale: Scale) -> list[Row]:
    rows = []
    for workload, (least, most) in _PAPERS_18.items():
        latencies = _latencies(results, scale, workload)
        best = min(latencies.values())
        good = [size for size, latency in latencies.items() if latency <= _GOOD * best]
        rows.append(Row("Fig. 18b", f"{workload}: smallest good block size", min(good), least, "tokens", _EDGE))
        rows.append(Row("Fig. 18b", f"{workload}: largest good block size", max(good), most, "tokens", _EDGE))
    return rows


def _plot_figure18(figure: Any, results: Results, scale: Scale) -> None:
    axes = figure.subplots()
    for workload, rate in _RATES_18.items():
        found = _latencies(results, scale, workload)
        axes.plot(list(found), list(found.values()), marker="o", label=f"{workload}, {rate:g} requests/s")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("block size, tokens")
    axes.set_ylabel("s per output token")
    axes.legend()


# -- Fig. 19 -------------------------------------------------------------------------------------------------------

NUM_TOKENS_19 = 256
"""Of the request that is preempted in the microbenchmark."""
_RATE_19 = 2.2
"""Requests per second of ShareGPT: more than fit, so that requests are preempted."""


def preemption_seconds(block_size: int) -> tuple[float, float]:
    """(swapping out and in, recomputing) a request of NUM_TOKENS_19 tokens on OPT-13B's server."""
    server = SERVERS["opt-13b"]
    cost = server.cost()
    replica = Replica(cost, server.settings(block_size=block_size, swap_space=4 * GIB))
    swapped = 2 * math.ceil(NUM_TOKENS_19 / block_size) * replica.executor.measure_preemption_costs().seconds_per_block
    prompt = StepWork(
        num_tokens=NUM_TOKENS_19,
        num_sequences=1,
        num_sampled=1,
        num_chunks=1,
        decode_context=[0],
        prefill_context=[NUM_TOKENS_19],
        prefill_pairs=[NUM_TOKENS_19 * (NUM_TOKENS_19 + 1) // 2],
    )
    return swapped, cost.step_seconds(prompt)


def _swapping(block_size: int, mode: str, scale: Scale) -> Window:
    engine = (("block_size", block_size), ("preemption_mode", mode), ("swap_space", 64 * GIB))
    return Window(Load("opt-13b", PAGED, "sharegpt", engine=engine), _RATE_19, scale.window["sharegpt"] // 2)


def _figure19_trials(scale: Scale) -> list[Window]:
    return [_swapping(size, mode, scale) for size in (16, 64) for mode in ("recompute", "swap")]


def _figure19(results: Results, scale: Scale) -> list[Row]:
    costs = {size: preemption_seconds(size) for size in BLOCK_SIZES}
    excess = max(recomputed / swapped for swapped, recomputed in costs.values())
    constant = max(recomputed for _, recomputed in costs.values()) / min(recomputed for _, recomputed in costs.values())
    rows = [
        Row("Fig. 19", "recomputation over swapping, at most (any block size)", excess, 1.2, at_most=True),
        Row("Fig. 19", "recomputation, slowest over fastest block size", constant, 1.0),
    ]  # fmt: skip
    for size in (16, 64):
        swap, recompute = (
            results.usage(_swapping(size, mode, scale)).normalized_latency for mode in ("swap", "recompute")
        )
        rows.append(
            Row("Fig. 19", f"latency with swapping over with recomputation, blocks of {size}", swap / recompute, 1.0)
        )
    return rows


def _plot_figure19(figure: Any, results: Results, scale: Scale) -> None:
    axes = figure.subplots()
    costs = [preemption_seconds(size) for size in BLOCK_SIZES]
    axes.plot(BLOCK_SIZES, [1e3 * swapped for swapped, _ in costs], marker="o", label="swapping out and in")
    axes.plot(BLOCK_SIZES, [1e3 * recomputed for _, recomputed in costs], marker="o", label="recomputation")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("block size, tokens")
    axes.set_ylabel(f"ms for {NUM_TOKENS_19} tokens, OPT-13B")
    axes.legend()


BLOCK_FIGURES = (
    Figure("fig18b", "Fig. 18b: block size, OPT-13B", _figure18, _figure18_trials, _plot_figure18, remark=_REMARK_18),
    Figure("fig19", "Fig. 19: recomputation against swapping, OPT-13B", _figure19, _figure19_trials, _plot_figure19),
)
