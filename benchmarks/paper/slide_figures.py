"""Fig. 18a, and the slides: what block tables cost a kernel, CUDA graphs, host overhead, hybrid models, experts."""

from __future__ import annotations

from benchmarks.paper.figure import Figure, Results, Row, Scale
from benchmarks.paper.kernel_timing import KernelTiming
from benchmarks.paper.launches import EAGER, FULL, PIECEWISE, decode, step_seconds
from quire.config.parallel import ParallelConfig
from quire.kv_cache.layout import group_layers
from quire.simulator.cost import CostModel
from quire.simulator.hardware import find
from quire.simulator.memory import device_specs
from quire.simulator.shape import find_shape

_TIMINGS = (KernelTiming(16, 256), KernelTiming(4, 1024))
"""As many tokens in both, and more than a processor's cache holds."""

_TIME = "% of time"
"""Compared by the ratio, unlike shares of memory."""


def _figure18_trials(scale: Scale) -> tuple[KernelTiming, ...]:
    return _TIMINGS


def _figure18(results: Results, scale: Scale) -> list[Row]:
    slowdowns = [100 * results.slowdown(timing) for timing in _TIMINGS]
    why = "this machine's kernel, not the paper's: less is better"
    return [
        Row(
            "Fig. 18a", f"attention over blocks of 16, slower than in one piece: {what}", value, paper, _TIME, why, True
        )
        for what, value, paper in (("least", min(slowdowns), 20.0), ("most", max(slowdowns), 26.0))
    ]


# -- slides --------------------------------------------------------------------------------------------------------

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 512
_MODEL, _DEVICE = "llama-3-8b", "h100"
_RANGE = "inside the slides' range, which names neither model nor device"
_HYBRIDS = ("gemma-3-27b", "gpt-oss-120b")
_MOES = {"deepseek-v3": ("DeepSeek-V3", 32.0), "kimi-k2": ("Kimi-K2", 48.0)}


def _cost() -> CostModel:
    return CostModel(find_shape(_MODEL), find(_DEVICE))


def _graphs(results: Results, scale: Scale) -> list[Row]:
    cost = _cost()
    steps = {batch: step_seconds(cost, decode(batch, CONTEXT)) for batch in BATCHES}
    over_eager = [100 * (each[EAGER] / each[PIECEWISE] - 1) for each in steps.values()]
    slower = {batch: 100 * (each[PIECEWISE] / each[FULL] - 1) for batch, each in steps.items()}
    large = max(value for batch, value in slower.items() if batch >= 8)
    why = "modelled; the slides name neither model nor device, nor the batches"
    return [
        Row("slides", "piecewise CUDA graphs faster than eager, least", min(over_eager), 6.0, _TIME, why),
        Row("slides", "piecewise CUDA graphs faster than eager, most", max(over_eager), 39.0, _TIME, why),
        Row("slides", "piecewise slower than one full graph, at worst", max(slower.values()), 7.0, _TIME, why, True),
        Row("slides", "piecewise slower than one full graph, batch of 8 or more", large, 2.0, _TIME, why, True),
    ]


def _unused_pages(model: str) -> float:
    """Share of a block's pages that the hybrid allocator leaves unused, over all groups."""
    groups, size = group_layers(device_specs(find_shape(model), "bfloat16", ParallelConfig()), 16)
    return 1 - sum(len(group.layers) for group in groups) / (len(groups) * size)


def _slides(results: Results, scale: Scale) -> list[Row]:
    cost = _cost()
    seconds = [cost.step_seconds(decode(batch, CONTEXT)) for batch in (BATCHES[0], BATCHES[-1])]
    rows = [
        Row("slides", "a decode step, ms, batch of 1", 1e3 * seconds[0], 5.0, "ms", _RANGE),
        Row("slides", f"a decode step, ms, batch of {BATCHES[-1]}", 1e3 * seconds[1], 10.0, "ms", _RANGE),
        Row("slides", "1 ms of host work beside the shortest step", 100 * 1e-3 / seconds[0], 20.0, _TIME, at_most=True),
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


SLIDE_FIGURES = (
    Figure(
        "fig18a",
        "Fig. 18a: attention over block tables, on this machine",
        _figure18,
        _figure18_trials,
        remark="The native CPU kernel with OPT-13B's heads, 16 sequences of 256 tokens and 4 of 1,024, one thread.",
    ),
    Figure(
        "graphs",
        "Slides: CUDA graphs",
        _graphs,
        remark=f"Modelled: {_MODEL} on {_DEVICE}, {BATCHES[0]} to {BATCHES[-1]} sequences of {CONTEXT} tokens.",
    ),
    Figure(
        "slides", "Slides: host overhead, hybrid models, experts", _slides, remark=f"Steps of {_MODEL} on {_DEVICE}."
    ),
)
