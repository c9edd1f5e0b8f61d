"""How fast the simulator is, and what memory it takes: an hour of traffic on one replica, a million requests on a
hundred, and two replicas whose memory is looked at while their pools fill up.

    python benchmarks/simulator/speed.py [--json FILE] [--requests 1000000] [--processes N] [--soak 20000]

Aims: the hour in under a minute on one core, the million in minutes over processes, memory flat.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quire.config.model_shape import ModelShape
from quire.config.parallel import ParallelConfig
from quire.simulator.cost import CostModel
from quire.simulator.fleet import ReplicaSpec, merged, simulate_fleet
from quire.simulator.hardware import Hardware, find
from quire.simulator.metrics import Metrics
from quire.simulator.replica import EngineSettings, simulate
from quire.simulator.shape import find_shape
from quire.simulator.trace import TraceRequest
from quire.simulator.workloads import Arrivals, stream

MODEL, GPU = "llama-3-8b", "h100"
RATE, HOUR = 10.0, 3600.0
NUM_REPLICAS = 100
SOAK_REPLICAS = 2


def measure(name: str, run: Callable[[], Metrics]) -> dict[str, Any]:
    """Wall and CPU seconds of a run, CPU of its processes included, and the largest resident sets so far: of this
    process, and of any other."""
    started, used = time.perf_counter(), _cpu_seconds()
    metrics = run()
    row = {
        "run": name,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": _cpu_seconds() - used,
        "peak_rss_mib": _peak_mib(resource.RUSAGE_SELF),
        "peak_rss_mib_of_a_process": _peak_mib(resource.RUSAGE_CHILDREN),
        "requests": metrics.num_finished,
        "steps": metrics.num_steps,
        "output_tokens": metrics.num_output_tokens,
        "simulated_seconds": metrics.end,
    }
    each = row["cpu_seconds"] / metrics.num_steps * 1e6
    print(
        f"{name:<34} {row['seconds']:>9.1f} {row['cpu_seconds']:>9.1f} {each:>8.0f} {metrics.num_finished:>10,} "
        f"{metrics.num_steps:>12,} {row['peak_rss_mib']:>9.0f} {row['peak_rss_mib_of_a_process']:>12.0f}",
        flush=True,
    )
    return row


def measure_memory(shape: ModelShape, hardware: Hardware, num_requests: int) -> list[dict[str, float]]:
    """Peak memory of this process after every tenth of the requests, served by SOAK_REPLICAS replicas in it."""
    rows: list[dict[str, float]] = []

    def watched(requests: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
        for number, request in enumerate(requests):
            if number % (num_requests // 10) == 0:
                rows.append({"requests": number, "peak_rss_mib": _peak_mib(resource.RUSAGE_SELF)})
            yield request

    requests = stream("alpaca", Arrivals(RATE * SOAK_REPLICAS, num_requests=num_requests))
    spec = ReplicaSpec(CostModel(shape, hardware, ParallelConfig(dp=SOAK_REPLICAS)), EngineSettings())
    simulate_fleet(watched(requests), spec, SOAK_REPLICAS, router="least-loaded")
    rows.append({"requests": num_requests, "peak_rss_mib": _peak_mib(resource.RUSAGE_SELF)})
    print(f"\n{SOAK_REPLICAS} replicas: requests so far, peak MiB of the process")
    for row in rows:
        print(f"{row['requests']:>10,} {row['peak_rss_mib']:>8.1f}")
    return rows


def _peak_mib(who: int) -> float:
    return resource.getrusage(who).ru_maxrss / 1024


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000, help="of the hundred replicas; 0: leave them out")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--hours", type=float, default=1.0, help="of traffic on one replica; 0: leave it out")
    parser.add_argument("--soak", type=int, default=20_000, help="requests of the look at memory; 0: leave it out")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    shape, hardware = find_shape(MODEL), find(GPU)
    # First, for what else is run would hide it: the peak of a process never falls.
    soak = measure_memory(shape, hardware, arguments.soak) if arguments.soak else []
    print(
        f"\n{'run':<34} {'seconds':>9} {'CPU s':>9} {'us/step':>8} {'requests':>10} {'steps':>12} {'MiB here':>9} "
        f"{'in a process':>12}",
        flush=True,
    )
    rows = []
    for name in ("sharegpt", "alpaca") if arguments.hours else ():
        requests = stream(name, Arrivals(RATE, duration=arguments.hours * HOUR))
        rows.append(
            measure(
                f"{name}, {RATE:g} req/s, {arguments.hours:g} h",
                lambda requests=requests: simulate(requests, CostModel(shape, hardware), EngineSettings()),
            )
        )
    if arguments.requests:
        cost = CostModel(shape, hardware, ParallelConfig(dp=NUM_REPLICAS))
        requests = stream("alpaca", Arrivals(RATE * NUM_REPLICAS, num_requests=arguments.requests))
        rows.append(
            measure(
                f"alpaca, {NUM_REPLICAS} replicas, {arguments.processes} processes",
                lambda: merged(
                    simulate_fleet(
                        requests,
                        ReplicaSpec(cost, EngineSettings()),
                        NUM_REPLICAS,
                        router="least-loaded",
                        num_processes=arguments.processes,
                    )
                ),
            )
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"runs": rows, "memory": soak}, indent=1) + "\n")


if __name__ == "__main__":
    main()
