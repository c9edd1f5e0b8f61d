"""Comparison, at rising rates, of all layouts of a number of devices that the model and its memory allow."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from quire.config.parallel import ParallelConfig
from quire.errors import InsufficientMemoryError, QuireError, UserError
from quire.simulator.cost import CostModel
from quire.simulator.metrics import Metrics
from quire.simulator.rates import UnboundedRateError, find_rate
from quire.simulator.scenario import Scenario
from quire.simulator.work import StepWork

GROWTH = 1.05
"""Ratio of tokens per second on doubling the rate, below which a layout is saturated."""
MAX_POINTS = 14
MAX_STAGES = 8
SAMPLE, CONTEXT = 100, 512
"""Requests and tokens of context to estimate a single request's time."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Point:
    """Result of one layout at one request rate. tpot: mean seconds. tokens_per_second: output of all devices."""

    layout: ParallelConfig
    rate: float
    tpot: float
    ttft: float
    tokens_per_second: float
    metrics: Metrics

    @property
    def interactivity(self) -> float:
        """Output tokens per second that one user sees."""
        return 1 / self.tpot if self.tpot else float("inf")

    @property
    def tokens_per_device(self) -> float:
        return self.tokens_per_second / self.layout.num_devices


@dataclass(frozen=True)
class SweepResult:
    """Result of `sweep` for a layout. points: at rising rates, the last one saturated. found_rate: requests per second
    that keep the objectives (None: no objectives, or no rate does; infinite: every rate does)."""

    layout: ParallelConfig
    points: tuple[Point, ...]
    found_rate: float | None


def layouts(scenario: Scenario, num_devices: int) -> list[ParallelConfig]:
    """Layouts of exactly `num_devices` devices in which the model fits: tensor parallelism and shared prompts in powers
    of two, at most MAX_STAGES stages, experts shared, whole or spread over all replicas, contexts whole or dealt.
    Raises UserError, with the last one's reason, without any."""
    if num_devices < 1:
        raise UserError(f"a sweep needs at least 1 device, not {num_devices}", param="gpus")
    found, reason = [], "there is none"
    for layout in _candidates(num_devices, has_experts=scenario.cost.shape.experts is not None):
        try:
            cost = _cost(scenario, layout)
            scenario.settings.config(cost)
        except (UserError, InsufficientMemoryError) as error:
            reason = str(error)
            continue
        found.append(layout)
    if not found:
        raise UserError(f"no layout of {num_devices} devices: {reason}", param="sweep")
    return found


def sweep(scenario: Scenario, candidates: Sequence[ParallelConfig], *, num_processes: int = 1) -> list[SweepResult]:
    """Run every layout at rising rates, and find its rate if there are objectives."""
    return list(side_by_side(partial(run_layout, scenario), candidates, num_processes))


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item], num_processes: int) -> Iterator[Result]:
    """Results of `work` for each item, in order, in several processes. Raises QuireError when one of them dies."""
    if num_processes <= 1 or len(items) <= 1:
        yield from map(work, items)
        return
    context = multiprocessing.get_context("spawn")
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(min(num_processes, len(items)), mp_context=context, initializer=die_quietly) as pool:
        try:
            yield from pool.map(work, items)
        except BrokenProcessPool:
            raise QuireError("a process of the simulator ended before its time") from None
        except BaseException:
            for process in multiprocessing.active_children():
                if process not in others:
                    process.terminate()  # otherwise the pool waits for their current work
            raise


def die_quietly() -> None:
    """Initializer of the simulator's processes: a keyboard interrupt ends them silently."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_layout(scenario: Scenario, layout: ParallelConfig) -> SweepResult:
    """Run a layout from a rate at which requests are alone, doubled until it is saturated."""
    scenario = replace(scenario, cost=_cost(scenario, layout))
    points: list[Point] = []
    rate = _lowest_rate(scenario)
    for _ in range(MAX_POINTS):
        found_point = point(layout, rate, scenario.simulate(rate))
        if math.isnan(found_point.tpot):  # no request arrived, or none of more than one token
            rate *= 2
            continue
        points.append(found_point)
        if len(points) > 1 and points[-1].tokens_per_second < GROWTH * points[-2].tokens_per_second:
            break
        rate *= 2
    found = None
    if not points:
        raise UserError("no request of more than one token arrives: take a longer duration", param="duration")
    if scenario.objectives:
        try:
            found = find_rate(scenario.simulate, scenario.holds, start=points[len(points) // 2].rate).rate
        except UnboundedRateError:
            found = math.inf
        except QuireError:
            found = None
    return SweepResult(layout, tuple(points), found)


def point(layout: ParallelConfig, rate: float, metrics: Metrics) -> Point:
    return Point(
        layout=layout,
        rate=rate,
        tpot=metrics.latencies["tpot"].mean,
        ttft=metrics.latencies["ttft"].mean,
        tokens_per_second=metrics.num_output_tokens / metrics.end if metrics.end else 0.0,
        metrics=metrics,
    )


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Points that no other one beats in both interactivity and tokens per device, by rising interactivity."""
    front: list[Point] = []
    for each in sorted(points, key=lambda point: (-point.interactivity, -point.tokens_per_device)):
        if not front or each.tokens_per_device > front[-1].tokens_per_device:
            front.append(each)
    return front[::-1]


def _candidates(num_devices: int, *, has_experts: bool) -> Iterator[ParallelConfig]:
    powers = [2**power for power in range(num_devices.bit_length())]
    for tp, pp, pcp in itertools.product(powers, range(1, MAX_STAGES + 1), powers):
        if num_devices % (tp * pp * pcp):
            continue
        layout = ParallelConfig(tp=tp, pp=pp, dp=num_devices // (tp * pp * pcp), pcp=pcp)
        yield layout
        yield from (replace(layout, dcp=2**power) for power in range(1, tp.bit_length()))
        if has_experts and layout.dp == 1 and tp > 1:
            yield replace(layout, ep=tp)
        if has_experts and layout.dp > 1 and pp == pcp == 1:
            yield replace(layout, ep=num_devices)


def _cost(scenario: Scenario, layout: ParallelConfig) -> CostModel:
    cost = scenario.cost
    return CostModel(
        cost.shape,
        cost.hardware,
        layout,
        cost.precision,
        expands_prompts=cost.expands_prompts,
        vision=cost.vision,
    )


def _lowest_rate(scenario: Scenario) -> float:
    outputs = [request.output_tokens for request in itertools.islice(scenario.source.requests(None), SAMPLE)]
    if not outputs:
        raise UserError("no request arrives: take a longer duration", param="duration")
    cost, kinds = scenario.cost, len(scenario.cost.windows)
    token = StepWork(num_tokens=1, num_sequences=1, num_sampled=1, num_decodes=1)
    token.decode_context = [CONTEXT] * kinds
    token.prefill_context = token.prefill_pairs = [0] * kinds
    return 0.5 * cost.layout.dp * len(outputs) / (sum(outputs) * cost.step_seconds(token))
