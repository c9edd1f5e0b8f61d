"""How fast the simulator is: an hour of traffic on one replica, and a million requests on a hundred.

    python benchmarks/simulator/speed.py [--json FILE] [--requests 1000000] [--processes N]

Aims: the hour in under a minute on one core, the million in minutes over processes, memory flat.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

from quire.simulator.cost import CostModel
from quire.simulator.fleet import ReplicaSpec, merged, simulate_fleet
from quire.simulator.hardware import find
from quire.simulator.layout import Layout
from quire.simulator.metrics import Metrics
from quire.simulator.replica import EngineSettings, simulate
from quire.simulator.shape import find_shape
from quire.simulator.workloads import Arrivals, stream

MODEL, GPU = "llama-3-8b", "h100"
RATE, HOUR = 10.0, 3600.0
NUM_REPLICAS = 100


def measure(name: str, run: Any) -> dict[str, Any]:
    """Wall and CPU seconds of a run, CPU of its processes included, and the largest resident set of any of them."""
    started, used = time.perf_counter(), _cpu_seconds()
    metrics: Metrics = run()
    row = {
        "run": name,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": _cpu_seconds() - used,
        "peak_rss_mib": max(
            resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        / 1024,
        "requests": metrics.num_finished,
        "steps": metrics.num_steps,
        "output_tokens": metrics.num_output_tokens,
        "simulated_seconds": metrics.end,
    }
    each = row["cpu_seconds"] / metrics.num_steps * 1e6
    print(
        f"{name:<34} {row['seconds']:>8.1f} s {row['cpu_seconds']:>8.1f} CPU s {row['peak_rss_mib']:>7.0f} MiB "
        f"{metrics.num_finished:>9,} requests {metrics.num_steps:>10,} steps of {each:.0f} us",
        flush=True,
    )
    return row


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000, help="of the hundred replicas; 0: leave them out")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--hours", type=float, default=1.0, help="of traffic on one replica")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    shape, hardware = find_shape(MODEL), find(GPU)
    rows = []
    for name in ("sharegpt", "alpaca"):
        requests = stream(name, Arrivals(RATE, duration=arguments.hours * HOUR))
        rows.append(
            measure(
                f"{name}, {RATE:g} req/s, {arguments.hours:g} h",
                lambda requests=requests: simulate(requests, CostModel(shape, hardware), EngineSettings()),
            )
        )
    if arguments.requests:
        cost = CostModel(shape, hardware, Layout(dp=NUM_REPLICAS))
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
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
