"""Many replicas behind a router, in one process or several. In each window of time the router shares requests out by
the replicas' last reports."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, Protocol

from quire.engine.core import EngineCore
from quire.engine.router import make_router
from quire.errors import QuireError
from quire.simulator.cost import CostModel
from quire.simulator.metrics import Metrics
from quire.simulator.replica import EngineSettings, MakeCore, Replica
from quire.simulator.trace import TraceRequest

REPORT_SECONDS = 0.25
"""Seconds between two reports of the replicas to the router."""
UNREPORTED_SECONDS = 60.0
"""Seconds of a window when the router needs no reports."""

Shares = Sequence[list[TraceRequest]]


@dataclass(frozen=True)
class ReplicaSpec:
    """Arguments of a replica (see `Replica`), sent to other processes."""

    cost: CostModel
    settings: EngineSettings
    make_core: MakeCore = EngineCore
    objectives: Mapping[str, float] = field(default_factory=dict)

    def build(self, number: int) -> Replica:
        settings = replace(self.settings, seed=self.settings.seed + number)
        return Replica(self.cost, settings, make_core=self.make_core, objectives=self.objectives)


class ReplicaGroup(Protocol):
    """Replicas of a fleet that run together, in this or another process: `begin_window` and `end_window` in turn, then
    `finish_replicas`."""

    def begin_window(self, shares: Shares, until: float) -> None:
        """Begin to serve the replicas' shares of requests up to `until`, in virtual seconds."""
        ...

    def end_window(self) -> list[int]:
        """Wait for the window's end; returns each replica's unfinished requests."""
        ...

    def finish_replicas(self) -> list[Metrics]:
        """Serve the remaining requests; returns each replica's metrics."""
        ...

    def close(self) -> None:
        """Stop at any time. Idempotent."""
        ...


def simulate_fleet(
    requests: Iterable[TraceRequest],
    spec: ReplicaSpec,
    num_replicas: int,
    *,
    router: str = "round-robin",
    num_processes: int = 1,
    report_seconds: float = REPORT_SECONDS,
) -> list[Metrics]:
    """Serve a trace by several replicas; returns each replica's metrics. Raises UserError for an unknown router."""
    chooser = make_router(router, num_replicas)
    window = report_seconds if chooser.needs_reports else UNREPORTED_SECONDS
    groups = _groups(spec, num_replicas, min(num_processes, num_replicas))
    try:
        for until, arrived in _windows(requests, window):
            shares: list[list[TraceRequest]] = [[] for _ in range(num_replicas)]
            for request in arrived:
                shares[chooser.choose(_beginnings(request))].append(request)
            for number, group in enumerate(groups):
                group.begin_window(shares[number :: len(groups)], until)
            num_live = [0] * num_replicas
            for number, group in enumerate(groups):
                num_live[number :: len(groups)] = group.end_window()
            chooser.learn(num_live)
        return _in_order([group.finish_replicas() for group in groups], num_replicas)
    finally:
        for group in groups:
            group.close()


def _beginnings(request: TraceRequest) -> tuple[str, ...]:
    return (request.prefix_group,) if request.prefix_group is not None and request.prefix_tokens else ()


def merged(results: Sequence[Metrics]) -> Metrics:
    """Metrics of all replicas as one; the arguments stay unchanged."""
    total = Metrics()
    for result in results:
        total.merge(result)
    return total


def _groups(spec: ReplicaSpec, num_replicas: int, num_processes: int) -> list[ReplicaGroup]:
    if num_processes <= 1:
        return [LocalGroup(spec, range(num_replicas))]
    groups: list[ReplicaGroup] = []
    try:
        for number in range(num_processes):
            groups.append(ReplicaProcesses(spec, range(number, num_replicas, num_processes)))
    except BaseException:
        for group in groups:
            group.close()
        raise
    return groups


def _in_order(results: Sequence[list[Metrics]], num_replicas: int) -> list[Metrics]:
    return [results[number % len(results)][number // len(results)] for number in range(num_replicas)]


def _windows(requests: Iterable[TraceRequest], seconds: float) -> Iterator[tuple[float, list[TraceRequest]]]:
    until, arrived = seconds, list[TraceRequest]()
    for request in requests:
        if request.arrival >= until:
            yield until, arrived
            arrived = []
            begin = seconds * int(request.arrival / seconds)
            if begin > until:
                yield begin, []
            until = begin + seconds
        arrived.append(request)
    yield until, arrived


class LocalGroup:
    """Replicas of this process, one after the other."""

    def __init__(self, spec: ReplicaSpec, numbers: Sequence[int]) -> None:
        self._replicas = [spec.build(number) for number in numbers]

    def begin_window(self, shares: Shares, until: float) -> None:
        for replica, share in zip(self._replicas, shares, strict=True):
            for request in share:
                replica.advance(request.arrival)
                replica.offer(request)
            replica.advance(until)

    def end_window(self) -> list[int]:
        return [replica.num_live for replica in self._replicas]

    def finish_replicas(self) -> list[Metrics]:
        results = []
        for replica in self._replicas:
            replica.advance(float("inf"))
            results.append(replica.finish_run())
        return results

    def close(self) -> None:
        """Do nothing."""


class ReplicaProcesses:
    def __init__(self, spec: ReplicaSpec, numbers: Sequence[int]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, spec, numbers), daemon=True)
        self._process.start()
        theirs.close()

    def begin_window(self, shares: Shares, until: float) -> None:
        self._send((shares, until))

    def end_window(self) -> list[int]:
        answer: list[int] = self._receive()
        return answer

    def finish_replicas(self) -> list[Metrics]:
        self._send(None)
        answer: list[Metrics] = self._receive()
        return answer

    def close(self) -> None:
        self._pipe.close()
        self._process.join(timeout=1)  # it ends by itself, unless it is in the middle of something
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _send(self, message: object) -> None:
        try:
            self._pipe.send(message)
        except OSError:
            self._receive()  # says why

    def _receive(self) -> Any:
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise QuireError("a process of the simulator ended before its time") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(pipe: Connection, spec: ReplicaSpec, numbers: Sequence[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt from the keyboard ends it, and says nothing
    try:
        group = LocalGroup(spec, numbers)
        while (message := pipe.recv()) is not None:
            group.begin_window(*message)
            pipe.send(group.end_window())
        pipe.send(group.finish_replicas())
    except EOFError:
        return  # given up
    except Exception as error:
        pipe.send(error)
