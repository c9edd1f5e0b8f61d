"""How many devices a load takes, and what a million tokens costs: the sums of docs/scale.md.

    python benchmarks/simulator/scale.py --model llama-3-70b --gpu h100 --tp 4 --price 3.00 [--requests-per-hour 1e6]

One replica is simulated under a growing rate until the objectives (--slo, for the 99th percentile) no longer hold. With
--ep a group of replicas shares experts; they are all alike, and one of them is simulated. The load then takes a number
of groups, each of which is given --headroom less than it holds; from that follow devices, nodes and, by --price (of a
device, for an hour, in any currency), the cost of a million tokens. Then a replica is simulated at its planned share
and at up to twice of that, which shows what breaks first: the first column to break its objective (marked), and whether
memory is full by then.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.cli.simulate import engine_settings, parse_objectives
from quire.config.parallel import ParallelConfig
from quire.simulator.cost import CostModel, Precision
from quire.simulator.hardware import find
from quire.simulator.metrics import Metrics
from quire.simulator.rates import find_rate
from quire.simulator.replica import EngineSettings, simulate
from quire.simulator.shape import find_shape
from quire.simulator.workloads import Arrivals, stream

HOUR = 3600.0
MILLION = 1e6
LOADS = (1.0, 1.25, 1.5, 2.0)
"""Of the planned share, for the table of what breaks first."""


@dataclass(frozen=True)
class Fleet:
    """What a load takes. rate: requests a second that one replica holds, share: what each of them is given; groups of
    `devices_per_group` devices."""

    rate: float
    share: float
    groups: int
    devices_per_group: int
    devices: int
    nodes: int
    input_tokens: float
    output_tokens: float
    cost_per_hour: float

    @property
    def cost_per_million_output(self) -> float:
        return self.cost_per_hour / (HOUR * self.output_tokens) * MILLION

    @property
    def cost_per_million(self) -> float:
        """Input and output tokens counted alike."""
        return self.cost_per_hour / (HOUR * (self.input_tokens + self.output_tokens)) * MILLION


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    replica = make_replica(options)
    found = find_rate(replica.run, replica.holds, start=options.start_rate, precision=0.03)
    fleet = plan_fleet(replica.cost, found.rate, found.metrics, options)
    loads = [(load, load * fleet.share, replica.serve_trace(load * fleet.share)) for load in LOADS]
    show(replica, fleet, loads, options)
    if options.json:
        options.json.write_text(json.dumps(as_dict(replica, fleet, loads), indent=2))
    return 0


@dataclass(frozen=True)
class ReplicaRun:
    """One replica under synthetic requests."""

    cost: CostModel
    settings: EngineSettings
    workload: str
    duration: float
    objectives: dict[str, float]

    def run(self, rate: float) -> Metrics:
        requests = stream(self.workload, Arrivals(rate, duration=self.duration))
        return simulate(requests, self.cost, self.settings, objectives=self.objectives)

    def holds(self, metrics: Metrics) -> bool:
        """Whether 99 of 100 requests met each objective, and none was refused."""
        return metrics.num_finished > 0 and metrics.num_refused == 0 and not self.broken(metrics)

    def broken(self, metrics: Metrics) -> list[str]:
        return [name for name, most in self.objectives.items() if metrics.latencies[name].percentile(99) > most]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--gpu", required=True)
    for name in ("tp", "pp", "ep"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--dtype")
    parser.add_argument("--kv-cache-dtype")
    parser.add_argument("--workload", default="sharegpt")
    parser.add_argument("--requests-per-hour", type=float, default=1e6)
    parser.add_argument("--slo", default="ttft=1s,tpot=50ms")
    parser.add_argument("--headroom", type=float, default=0.2, help="of what a group holds, kept free (0.2)")
    parser.add_argument("--price", type=float, required=True, help="of a device for an hour")
    parser.add_argument("--duration", type=float, default=300.0, help="seconds of arrivals of each simulation (300)")
    parser.add_argument("--start-rate", type=float, default=4.0, help="where the search begins (4)")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--json", type=Path)
    return parser


def make_replica(options: argparse.Namespace) -> ReplicaRun:
    """A replica, as one of those that share experts."""
    shape = find_shape(options.model)
    layout = ParallelConfig(tp=options.tp, pp=options.pp, dp=max(1, options.ep // options.tp), ep=options.ep)
    precision = Precision.of(shape, options.dtype, options.kv_cache_dtype)
    return ReplicaRun(
        cost=CostModel(shape, find(options.gpu), layout, precision),
        settings=engine_settings({"max_num_seqs": options.max_num_seqs}),
        workload=options.workload,
        duration=options.duration,
        objectives=parse_objectives(options.slo),
    )


def plan_fleet(cost: CostModel, rate: float, metrics: Metrics, options: argparse.Namespace) -> Fleet:
    """Groups for the load, and what they cost."""
    wanted = options.requests_per_hour / HOUR
    replicas = cost.layout.dp
    groups = math.ceil(wanted / (replicas * rate * (1 - options.headroom)))
    each = cost.layout.num_devices
    devices = groups * each
    return Fleet(
        rate=rate,
        share=wanted / (groups * replicas),
        groups=groups,
        devices_per_group=each,
        devices=devices,
        nodes=math.ceil(devices / cost.hardware.node_size),
        input_tokens=wanted * metrics.num_input_tokens / metrics.num_finished,
        output_tokens=wanted * metrics.num_output_tokens / metrics.num_finished,
        cost_per_hour=devices * options.price,
    )


Loads = Sequence[tuple[float, float, Metrics]]
"""(of the planned share, requests a second, what came of it)"""


def show(replica: ReplicaRun, fleet: Fleet, loads: Loads, options: argparse.Namespace) -> None:
    cost = replica.cost
    wanted = options.requests_per_hour / HOUR
    print(f"{cost.shape.name} on {cost.hardware.title}, {cost.layout}, {options.workload}, {options.slo}")
    print(
        f"  load       {wanted:,.0f} requests/s: {fleet.input_tokens:,.0f} tokens/s in, "
        f"{fleet.output_tokens:,.0f} tokens/s out"
    )
    print(f"  replica    {cost.layout.devices_per_replica} devices, {fleet.rate:.2f} requests/s at most")
    print(
        f"  fleet      {fleet.groups} groups of {fleet.devices_per_group} devices: {fleet.devices} devices, "
        f"{fleet.nodes} nodes ({options.headroom:.0%} headroom)"
    )
    print(
        f"  cost       {fleet.cost_per_hour:,.0f} an hour at {options.price:g} a device: "
        f"{fleet.cost_per_million_output:.2f} a million tokens out, {fleet.cost_per_million:.2f} in and out"
    )
    print(
        f"  {'load':>5} {'req/s':>7} {'TTFT P50':>10} {'P99':>9} {'TPOT P50':>10} {'P99':>9} {'batch':>6} {'KV':>5} "
        f"{'preempted':>10}"
    )
    for load, rate, metrics in loads:
        row = row_of(replica, metrics)
        print(
            f"  {load:>5.0%} {rate:>7.2f} {row['ttft_p50']:>8.2f} s {row['ttft_p99']:>7.2f} s "
            f"{1e3 * row['tpot_p50']:>7.1f} ms {1e3 * row['tpot_p99']:>6.1f} ms {row['batch']:>6.0f} {row['kv']:>5.0%} "
            f"{row['preemptions']:>10,}  {' and '.join(row['broken']) and 'breaks ' + ' and '.join(row['broken'])}"
        )


def row_of(replica: ReplicaRun, metrics: Metrics) -> dict[str, Any]:
    latencies = metrics.latencies
    return {
        "ttft_p50": latencies["ttft"].percentile(50),
        "ttft_p99": latencies["ttft"].percentile(99),
        "tpot_p50": latencies["tpot"].percentile(50),
        "tpot_p99": latencies["tpot"].percentile(99),
        "batch": metrics.mean_running,
        "kv": metrics.mean_kv_usage,
        "preemptions": metrics.stats.preemptions_total,
        "broken": replica.broken(metrics),
    }


def as_dict(replica: ReplicaRun, fleet: Fleet, loads: Loads) -> dict[str, Any]:
    costs = {"cost_per_million_output": fleet.cost_per_million_output, "cost_per_million": fleet.cost_per_million}
    rows = [{"load": load, "rate": rate, **row_of(replica, metrics)} for load, rate, metrics in loads]
    return {"fleet": {**vars(fleet), **costs}, "loads": rows}


if __name__ == "__main__":
    sys.exit(main())
