"""Table 1, Fig. 1, §3, Fig. 2 and Fig. 11: what memory there is, what fills it, and how long requests are."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

from benchmarks.baselines.systems import ORCA_MAX, ORCA_ORACLE, ORCA_POW2, PAGED
from benchmarks.paper.figure import Figure, Results, Row, Scale
from benchmarks.paper.servers import GIB, SERVERS
from benchmarks.paper.trials import Load, Window
from quire.simulator.replica import Replica
from quire.simulator.workloads import ALPACA, SHAREGPT, Arrivals, stream

_KV_GIB = {"opt-13b": 12.0, "opt-66b": 21.0, "opt-175b": 264.0}
_UTILIZATION = 0.95
"""Of the memory beside weights and activations, for Table 1's last columns: what the engine of the paper took."""
FULL_RATE = 4.0
"""Requests per second: more than any system serves, so that memory is full."""
FIG2 = {ORCA_MAX: 20.4, ORCA_POW2: 26.8, ORCA_ORACLE: 38.2, PAGED: 96.3}
FIG11 = ((SHAREGPT, "sharegpt", 161.31, 337.99), (ALPACA, "alpaca", 19.31, 58.45))
NUM_LENGTHS = 50_000


def _slots(model: str, memory: int | None) -> tuple[float, int]:
    """(GiB of the KV cache over all devices, token slots): sized by the engine itself, from a device's memory."""
    server = SERVERS[model]
    settings = server.settings(kv_cache_memory=memory, gpu_memory_utilization=_UTILIZATION, max_num_seqs=256)
    replica = Replica(server.cost(), settings)
    stats = replica.core.stats()
    slots = stats.num_blocks * stats.block_size
    return stats.num_blocks * stats.block_bytes * server.num_gpus / GIB, slots


def _table1(results: Results, scale: Scale) -> list[Row]:
    rows = []
    for model, kv in _KV_GIB.items():
        server = SERVERS[model]
        weights = server.cost().shape.weight_bytes() / 1e9
        rows.append(Row("Table 1", f"{server.title}: weights, GB", weights, server.weights, "GB"))
        rows.append(
            Row(
                "Table 1",
                f"{server.title}: memory for KV, GiB, sized by the engine",
                _slots(model, None)[0],
                kv,
                "GiB",
                "the paper keeps more for activations and the framework's workspace",
            )
        )
        memory = server.kv_memory // server.num_gpus
        rows.append(
            Row("Table 1", f"{server.title}: KV slots in {kv:g} GiB, thousands", _slots(model, memory)[1] / 1e3,
                server.slots / 1e3, "K")
        )  # fmt: skip
    return rows


def _figure1(results: Results, scale: Scale) -> list[Row]:
    server = SERVERS["opt-13b"]
    memory = server.cost().hardware.memory
    weights = 100 * server.cost().shape.weight_bytes() / memory
    kv = 100 * _slots("opt-13b", None)[0] * GIB / memory
    per_token = server.cost().shape.kv_bytes_per_token()
    return [
        Row("Fig. 1", "13B on A100-40GB: weights", weights, 65.0, "%"),
        Row("Fig. 1", "13B on A100-40GB: KV cache", kv, 30.0, "%"),
        Row("§3", "OPT-13B: KV of a token, KB", per_token / 1024, 800.0, "KB"),
        Row("§3", "OPT-13B: KV of 2,048 tokens, GB", 2048 * per_token / GIB, 1.6, "GB"),
    ]


def _full_window(system: str, scale: Scale) -> Window:
    return Window(Load("opt-13b", system, "sharegpt"), FULL_RATE, scale.window["sharegpt"])


def _figure2_trials(scale: Scale) -> list[Window]:
    return [_full_window(system, scale) for system in FIG2]


def _figure2(results: Results, scale: Scale) -> list[Row]:
    return [
        Row("Fig. 2", f"KV memory that holds token states, {system}", 100 * usage.stored, paper, "%")
        for system, paper in FIG2.items()
        for usage in [results.usage(_full_window(system, scale))]
    ]


def _plot_figure2(figure: Any, results: Results, scale: Scale) -> None:
    axes = figure.subplots()
    bottoms = [0.0] * len(FIG2)
    usages = [results.usage(_full_window(system, scale)) for system in FIG2]
    parts = {
        "token states": [100 * usage.stored for usage in usages],
        "reserved": [100 * usage.reserved for usage in usages],
        "internal fragmentation and rounding": [100 * usage.wasted for usage in usages],
    }
    parts["free, but too small"] = [100 - sum(heights) for heights in zip(*parts.values(), strict=True)]
    for label, heights in parts.items():
        axes.bar(list(FIG2), heights, bottom=bottoms, label=label)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.scatter(list(FIG2), list(FIG2.values()), color="black", marker="_", s=400, label="token states in the paper")
    axes.set_ylabel("% of the KV memory")
    axes.legend(fontsize="small")


def _figure11(results: Results, scale: Scale) -> list[Row]:
    rows = []
    for shape, workload, mean_input, mean_output in FIG11:
        requests = list(itertools.islice(stream(workload, Arrivals(1.0, num_requests=NUM_LENGTHS)), NUM_LENGTHS))
        found = statistics.fmean(request.input_tokens for request in requests)
        rows.append(Row("Fig. 11", f"{shape.name}: mean input tokens", found, mean_input, "tokens"))
        found = statistics.fmean(request.output_tokens for request in requests)
        rows.append(Row("Fig. 11", f"{shape.name}: mean output tokens", found, mean_output, "tokens"))
    return rows


MEMORY_FIGURES = (
    Figure("table1", "Table 1: memory of the paper's servers", _table1),
    Figure("fig1", "Fig. 1 and §3: what memory is spent on", _figure1),
    Figure(
        "fig2",
        "Fig. 2: KV memory that holds token states, OPT-13B, ShareGPT",
        _figure2,
        _figure2_trials,
        _plot_figure2,
        remark="Share of all slots of the pool, averaged over the time in which a request waits for memory.",
    ),
    Figure("fig11", "Fig. 11: lengths of requests", _figure11),
)
