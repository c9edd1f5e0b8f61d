"""Fig. 18b and 19, and three numbers of the slides: block size, recomputation against swapping, host overhead, hybrid
models, experts."""

from __future__ import annotations

import math
from typing import Any

from quire.bench.baselines.systems import PAGED
from quire.bench.paper.figure import Figure, Results, Row, Scale
from quire.bench.paper.servers import GIB, SERVERS
from quire.bench.paper.trials import Load, Window
from quire.kv_cache.layout import group_layers
from quire.simulator.cost import CostModel
from quire.simulator.hardware import find
from quire.simulator.layout import Layout
from quire.simulator.replica import Replica
from quire.simulator.shape import find_shape
from quire.simulator.work import StepWork

BLOCK_SIZES = (1, 4, 8, 16, 32, 64, 128, 256)
_RATES_18 = {"sharegpt": 1.8, "alpaca": 45.0}
"""Requests per second, close below what the engine sustains."""
_GOOD = 1.1
"""A block size is as good as the best one when its latency is at most so many times the best."""
_SMALL = "the cost model does not know what a kernel loses on small blocks; memory alone favours them"
_LARGE = "the closer the rate is to what is sustained, the more the ends of large blocks cost; the paper's is not given"
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
        rows.append(Row("Fig. 18b", f"{workload}: smallest good block size", min(good), least, "tokens", _SMALL))
        rows.append(Row("Fig. 18b", f"{workload}: largest good block size", max(good), most, "tokens", _LARGE))
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
        Row("Fig. 19", "recomputation over swapping, at most (any block size)", excess, 1.2, "x",
            "large blocks are swapped at 80 % of PCIe 4 here; the paper's engine copied more slowly"),
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


# -- slides --------------------------------------------------------------------------------------------------------

_HYBRIDS = ("gemma-3-27b", "gpt-oss-120b")
_MOES = {"deepseek-v3": ("DeepSeek-V3", 32.0), "kimi-k2": ("Kimi-K2", 48.0)}


def _unused_pages(model: str) -> float:
    """Share of a block's pages that the hybrid allocator leaves unused, over all groups."""
    groups, size = group_layers(find_shape(model).layer_specs("bfloat16", Layout()))
    return 1 - sum(len(group.layers) for group in groups) / (len(groups) * size)


def _slides(results: Results, scale: Scale) -> list[Row]:
    cost = CostModel(find_shape("llama-3-8b"), find("h100"))
    batch, context = 32, 512
    decode = StepWork(
        num_tokens=batch, num_sequences=batch, num_sampled=batch, num_decodes=batch,
        decode_context=[batch * context], prefill_context=[0], prefill_pairs=[0],
    )  # fmt: skip
    rows = [
        Row(
            "slides",
            f"1 ms of host work in a decode step, Llama-3-8B on H100, batch {batch}",
            100 * 1e-3 / cost.step_seconds(decode),
            20.0,
            "%",
            "the slides' number is for the shortest step of 5 ms",
        ),
        Row("slides", "hybrid allocator: memory unused, least", 100 * min(map(_unused_pages, _HYBRIDS)), 0.0, "%"),
        Row("slides", "hybrid allocator: memory unused, most", 100 * max(map(_unused_pages, _HYBRIDS)), 12.0, "%",
            "of the two hybrid models that the simulator knows"),
    ]  # fmt: skip
    for model, (title, paper) in _MOES.items():
        experts = find_shape(model).experts
        assert experts is not None
        ratio = experts.num_experts / experts.num_active
        rows.append(Row("slides", f"{title}: batch that saturates, over a dense model's", ratio, paper))
    return rows


BLOCK_FIGURES = (
    Figure("fig18b", "Fig. 18b: block size, OPT-13B", _figure18, _figure18_trials, _plot_figure18),
    Figure("fig19", "Fig. 19: recomputation against swapping, OPT-13B", _figure19, _figure19_trials, _plot_figure19),
    Figure("slides", "Slides: host overhead, hybrid models, experts", _slides),
)
