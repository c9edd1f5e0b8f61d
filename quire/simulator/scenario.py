from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from quire.engine.core import EngineCore
from quire.errors import UserError
from quire.simulator.adapters import by_zipf
from quire.simulator.cost import CostModel
from quire.simulator.fleet import ReplicaSpec, merged, simulate_fleet
from quire.simulator.metrics import Metrics
from quire.simulator.replica import EngineSettings, MakeCore
from quire.simulator.trace import TraceRequest, read_trace
from quire.simulator.workloads import Arrivals, stream


class RequestSource(Protocol):
    def requests(self, rate: float | None) -> Iterator[TraceRequest]:
        """Requests at `rate` per second (None: the native rate); equal for equal rates."""
        ...

    def rate(self) -> float | None:
        """Native requests per second; None: unknown."""
        ...


@dataclass(frozen=True)
class TraceSource:
    """Requests of a trace file. Other rates stretch its arrivals evenly."""

    path: Path

    def requests(self, rate: float | None) -> Iterator[TraceRequest]:
        if rate is None:
            yield from read_trace(self.path)
            return
        native = self.rate()
        if native is None:
            raise UserError(f"the requests of {self.path} arrive at one moment: they have no rate", param="rate")
        for request in read_trace(self.path):
            yield replace(request, arrival=request.arrival * native / rate)

    def rate(self) -> float | None:
        count, last = 0, 0.0
        for request in read_trace(self.path):
            count, last = count + 1, request.arrival
        return count / last if last else None


@dataclass(frozen=True)
class SyntheticSource:
    """Workload of `quire.simulator.workloads`. n: parallel samples, beam_width: 0 for none; both for every request.
    adapters: their number; skew: Zipf's exponent."""

    name: str
    arrivals: Arrivals
    seed: int = 0
    n: int = 1
    beam_width: int = 0
    adapters: int = 0
    skew: float = 1.0

    def requests(self, rate: float | None) -> Iterator[TraceRequest]:
        arrivals = self.arrivals if rate is None else replace(self.arrivals, rate=rate)
        requests = stream(self.name, arrivals, self.seed, n=self.n, beam_width=self.beam_width)
        return by_zipf(requests, self.adapters, self.skew, self.seed) if self.adapters else requests

    def rate(self) -> float | None:
        return self.arrivals.rate


@dataclass(frozen=True)
class Scenario:
    """Simulation of a workload without its rate. objectives: name of LATENCIES -> seconds, each for `percentile`
    percent of the requests."""

    source: RequestSource
    cost: CostModel
    settings: EngineSettings = field(default_factory=EngineSettings)
    router: str = "round-robin"
    objectives: Mapping[str, float] = field(default_factory=dict)
    percentile: float = 99.0
    make_core: MakeCore = EngineCore

    def simulate(self, rate: float | None = None, *, num_processes: int = 1) -> Metrics:
        """Serve the requests at a rate (None: native) by all replicas of the layout."""
        return merged(self.run_each(rate, num_processes=num_processes))

    def run_each(self, rate: float | None = None, *, num_processes: int = 1) -> list[Metrics]:
        """`simulate` with each replica's metrics."""
        spec = ReplicaSpec(self.cost, self.settings, self.make_core, dict(self.objectives))
        return simulate_fleet(
            self.source.requests(rate), spec, self.cost.layout.dp, router=self.router, num_processes=num_processes
        )

    def holds(self, metrics: Metrics) -> bool:
        """True if a run met all objectives and refused no request. False without requests."""
        return (
            metrics.num_finished > 0
            and metrics.num_refused == 0
            and all(
                metrics.latencies[name].percentile(self.percentile) <= limit
                for name, limit in self.objectives.items()
                if metrics.latencies[name].count
            )
        )
