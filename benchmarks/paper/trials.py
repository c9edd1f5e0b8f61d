"""Simulated runs of a system under a workload, as data that a process can be handed, and what is measured of them.

Two kinds. A `Window` offers requests at a rate for a while and looks at what follows a warm-up: how many run side by
side, what the KV memory holds. A `Curve` finds the highest rate at which the mean normalised latency stays below LIMIT,
from runs that serve all their requests; the same requests arrive at every rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.baselines.systems import SYSTEMS
from benchmarks.paper.servers import SERVERS
from quire.engine.core import EngineCore
from quire.simulator.replica import Observer, Record, Replica
from quire.simulator.workloads import Arrivals, stream

LIMIT = 0.1
"""Seconds of latency for each output token, as a mean over requests: where curves have turned upward. The paper's reach
1 s in an hour, in which a queue has six times as long to grow as in 600 seconds: 0.1 here is some 0.4 there."""
OFF_THE_CHART = 1.0
"""A run is given up when its normalised latency is sure to exceed this: the paper's plots end there."""
STEP = 1.1
"""Factor between two rates that are tried."""
WARM_UP = 0.3
"""Share of a window that is left out at its beginning."""
MIN_WAITING = 128
"""A queue that is never empty within a second."""
NO_END = 10**9
MORE_RATES = 4
"""Rates that are tried at most beside the given fractions."""
SLICE = 20.0
"""Seconds between two looks at a run that may be given up."""


@dataclass(frozen=True)
class Load:
    """A system and its workload. engine: options of EngineSettings that differ from the paper's, as pairs."""

    server: str
    system: str
    workload: str
    n: int = 1
    beam_width: int = 0
    engine: tuple[tuple[str, Any], ...] = ()
    seed: int = 0

    def replica(self, observer: Observer) -> Replica:
        server = SERVERS[self.server]
        make_core = partial(EngineCore, make_scheduler=SYSTEMS[self.system])
        return Replica(server.cost(), server.settings(**dict(self.engine)), make_core=make_core, observer=observer)

    def arrivals(self, rate: float, num_requests: int) -> Any:
        arrivals = Arrivals(rate, num_requests=num_requests)
        return stream(self.workload, arrivals, self.seed, n=self.n, beam_width=self.beam_width)


@dataclass
class Usage:
    """Of a window. Shares are of all slots of the pool, averaged over the time in which a request waited for memory
    (over all of it where none did)."""

    mean_running: float = math.nan
    normalized_latency: float = math.nan
    stored: float = math.nan
    reserved: float = math.nan
    wasted: float = math.nan
    saved: float = math.nan
    """Blocks saved by sharing, of those without sharing."""
    num_preemptions: int = 0
    num_finished: int = 0


@dataclass(frozen=True)
class Window:
    """Offers `num_requests` at `rate`, and stops with the last arrival."""

    load: Load
    rate: float
    num_requests: int

    def __call__(self) -> Usage:
        usage, sums = Usage(), _Sums(begin=WARM_UP * self.num_requests / self.rate)
        replica = self.load.replica(
            Observer(on_record=sums.take, on_step=lambda core, seconds: sums.look(replica, seconds))
        )
        for request in self.load.arrivals(self.rate, self.num_requests):
            replica.advance(request.arrival)
            replica.offer(request)
        if sums.seconds:
            usage.mean_running = sums.running / sums.seconds
            seconds, slots = (sums.full_seconds, sums.full_slots) if sums.full_seconds else (sums.seconds, sums.slots)
            usage.stored, usage.reserved, usage.wasted = (part / seconds for part in slots)
        if sums.logical:
            usage.saved = 1 - sums.used / sums.logical
        usage.num_preemptions = replica.core.stats().preemptions_total
        usage.num_finished = sums.num_finished
        if sums.num_finished:
            usage.normalized_latency = sums.latency / sums.num_finished
        return usage


@dataclass
class _Sums:
    """Integrals over the seconds after `begin`."""

    begin: float
    seconds: float = 0.0
    running: float = 0.0
    full_seconds: float = 0.0
    slots: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """Shares that are stored, reserved and wasted."""
    full_slots: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """The same while a request waited."""
    used: float = 0.0
    logical: float = 0.0
    latency: float = 0.0
    num_finished: int = 0

    def look(self, replica: Replica, seconds: float) -> None:
        if replica.clock.now() < self.begin:
            return
        stats = replica.core.stats()
        self.seconds += seconds
        self.running += seconds * stats.num_running
        self.used += stats.num_used_blocks
        self.logical += stats.num_logical_blocks
        share = seconds / (stats.num_blocks * stats.block_size)
        parts = stats.num_stored_tokens, stats.num_reserved_slots, stats.num_wasted_slots
        for index, part in enumerate(parts):
            self.slots[index] += share * part
        if stats.num_waiting:
            self.full_seconds += seconds
            for index, part in enumerate(parts):
                self.full_slots[index] += share * part

    def take(self, record: Record) -> None:
        self.latency += record.normalized_latency
        self.num_finished += 1


@dataclass
class Rates:
    """Of a curve. points: (rate, mean normalised latency), by rate; those beyond OFF_THE_CHART are lower bounds."""

    sustained: float
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """Tries `fractions` of the throughput of a full queue, and more rates until LIMIT lies between two of them. Every
    run offers requests for `seconds` and serves them all."""

    load: Load
    seconds: float
    fractions: tuple[float, ...] = (0.9, 1.0, 1.1)

    def __call__(self) -> Rates:
        capacity = self._capacity()
        found: dict[float, float] = {}
        for fraction in self.fractions:
            found[fraction * capacity] = self._latency(fraction * capacity)
            if found[fraction * capacity] > OFF_THE_CHART:
                break
        for _ in range(MORE_RATES):
            if found[rate := min(found)] > LIMIT:
                found[rate / STEP] = self._latency(rate / STEP)
            elif found[rate := max(found)] <= LIMIT:
                found[rate * STEP] = self._latency(rate * STEP)
        points = sorted(found.items())
        below = [point for point in points if point[1] <= LIMIT]
        above = [point for point in points if point[1] > LIMIT]
        if not (below and above):  # too short a run for a queue to build up: `--quick`
            return Rates(capacity, points)
        (low, at_low), (high, at_high) = below[-1], above[0]
        if high < low:
            return Rates(low, points)
        return Rates(low * (high / low) ** (math.log(LIMIT / at_low) / math.log(at_high / at_low)), points)

    def _capacity(self) -> float:
        """Requests per second while there are always more than find room: tokens of those that finish after a warm-up,
        over the mean tokens of all that are offered."""
        finished: list[tuple[float, int]] = []
        replica = self.load.replica(Observer(on_record=lambda each: finished.append((each.finish, each.num_tokens))))
        requests = self.load.arrivals(1.0, NO_END)
        num_offered = num_tokens = 0
        end = (1 + WARM_UP) * self.seconds / 2
        while replica.clock.now() < end:
            for _ in range(MIN_WAITING - replica.core.scheduler.current_load().num_waiting):
                request = next(requests)
                replica.offer(request)
                num_offered += 1
                num_tokens += request.output_tokens
            replica.advance(replica.clock.now() + 1.0)
        begin = WARM_UP * self.seconds / 2
        done = sum(tokens for time, tokens in finished if begin <= time < end)
        return done / (end - begin) / (num_tokens / num_offered)

    def _latency(self, rate: float) -> float:
        """Mean normalised latency over all requests; what is known of it when that exceeds OFF_THE_CHART."""
        total = 0.0

        def take(record: Record) -> None:
            nonlocal total
            total += record.normalized_latency

        replica = self.load.replica(Observer(on_record=take))
        num_requests = max(1, round(rate * self.seconds))
        for request in self.load.arrivals(rate, num_requests):
            replica.advance(request.arrival)
            replica.offer(request)
            if total > OFF_THE_CHART * num_requests:
                return total / num_requests
        while replica.num_live:
            replica.advance(replica.clock.now() + SLICE)
            if total > OFF_THE_CHART * num_requests:
                return total / num_requests
        replica.finish_run()
        return total / num_requests
