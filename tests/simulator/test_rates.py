"""The highest rate that holds: found where it is, and never lowered by more memory."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace

import pytest

from quire.config.parallel import ParallelConfig
from quire.errors import QuireError, UserError
from quire.simulator.metrics import Metrics
from quire.simulator.rates import PRECISION, find_rate
from quire.simulator.scenario import Scenario, SyntheticSource
from quire.simulator.sweep import Point, layouts, pareto_front, point, run_layout, side_by_side, sweep
from quire.simulator.work import StepWork
from quire.simulator.workloads import Arrivals
from tests.simulator.making import make_cost, settings
from tests.simulator.test_work import make_plan


def run_at(rate: float) -> Metrics:
    return Metrics(end=rate, num_requests=1)


@pytest.mark.parametrize("limit", [0.013, 0.99, 1.0, 1.01, 37.2, 4096.0])
@pytest.mark.parametrize("start", [1.0, 50.0])
def test_the_limit_is_found_from_either_side(limit: float, start: float) -> None:
    found = find_rate(run_at, lambda metrics: metrics.end <= limit, start=start)
    assert limit / (1 + PRECISION) <= found.rate <= limit
    assert found.metrics.end == found.rate
    failed = [trial.rate for trial in found.trials if not trial.holds]
    assert limit < min(failed) <= found.rate * (1 + PRECISION)


def test_objectives_that_nothing_or_everything_meets_are_said() -> None:
    with pytest.raises(QuireError, match="not even"):
        find_rate(run_at, lambda metrics: False)
    with pytest.raises(QuireError, match="do not bind"):
        find_rate(run_at, lambda metrics: True)


def test_a_search_without_requests_raises() -> None:
    """At low rates no request arrives in the time given, which is no objective kept."""
    case = replace(scenario(), source=SyntheticSource("alpaca", Arrivals(1.0, duration=5.0)), objectives={"ttft": 1e-9})
    assert not case.holds(case.simulate(1e-3))
    with pytest.raises(QuireError, match=r"no request arrives at .* take a longer duration"):
        find_rate(case.simulate, case.holds)
    for start in (math.inf, math.nan, 0.0):
        with pytest.raises(UserError, match="must begin at a rate above 0"):
            find_rate(case.simulate, case.holds, start=start)


def scenario(**changes: object) -> Scenario:
    return Scenario(
        source=SyntheticSource("sharegpt", Arrivals(1.0, num_requests=60)),
        cost=make_cost(),
        settings=settings(max_num_seqs=64, **changes),
        objectives={"normalized_latency": 2e-3},
        percentile=90.0,
    )


@pytest.mark.long
def test_more_memory_never_lowers_the_rate() -> None:
    rates = []
    for num_blocks in (130, 200, 300, 450):
        case = scenario(num_blocks_override=num_blocks)
        rates.append(find_rate(case.simulate, case.holds, start=20.0, precision=0.05).rate)
    assert all(less <= more * 1.05 for less, more in itertools.pairwise(rates)), rates
    assert rates[-1] > 1.3 * rates[0], "memory was never the limit"


def test_who_is_refused_breaks_every_objective() -> None:
    case = replace(scenario(num_blocks_override=20), objectives={})
    assert not case.holds(case.simulate(1.0))
    fits = replace(scenario(num_blocks_override=200), objectives={})
    assert fits.holds(fits.simulate(1.0))


def test_layouts_are_all_that_the_model_allows() -> None:
    found = layouts(scenario(), 8)
    assert ParallelConfig(tp=1, pp=1, dp=8) in found
    assert ParallelConfig(tp=8, pp=1, dp=1) in found
    assert ParallelConfig(tp=2, pp=4, dp=1) in found
    assert ParallelConfig(tp=2, pp=2, dp=1, pcp=2) in found
    assert all(layout.num_devices == 8 for layout in found)
    assert all(layout.pp <= 4 for layout in found), "the model has four layers"
    small = replace(scenario(), cost=make_cost(num_attention_heads=2, num_key_value_heads=2))
    assert max(layout.tp for layout in layouts(small, 8)) == 2


def test_experts_are_swept_in_each_replica_and_spread() -> None:
    mixture = {"model_type": "mixtral", "architectures": [], "num_local_experts": 8, "num_experts_per_tok": 2}
    case = replace(scenario(), cost=make_cost(**mixture))
    found = layouts(case, 4)
    spread = {(layout.tp, layout.dp) for layout in found if layout.ep == 4 != layout.tp}
    assert spread == {(1, 4), (2, 2)}
    whole = {(layout.tp, layout.pp, layout.pcp) for layout in found if 1 < layout.ep == layout.tp and layout.dp == 1}
    assert whole == {(2, 2, 1), (2, 1, 2), (4, 1, 1)}
    assert len(found) == len(set(found)) == len(layouts(scenario(), 4)) + 5
    with pytest.raises(UserError, match="at least 1 device, not 0"):
        layouts(case, 0)


def test_objectives_that_do_not_bind_hold_at_every_rate() -> None:
    source = SyntheticSource("alpaca", Arrivals(1.0, num_requests=4))
    case = replace(scenario(), source=source, objectives={"latency": 1e9})
    assert run_layout(case, ParallelConfig()).found_rate == math.inf
    assert run_layout(replace(case, objectives={"latency": 1e-9}), ParallelConfig()).found_rate is None


def test_a_sweep_without_requests_says_so() -> None:
    case = replace(scenario(), source=SyntheticSource("alpaca", Arrivals(1.0, duration=1e-6)))
    with pytest.raises(UserError, match="no request arrives"):
        run_layout(case, ParallelConfig())


def test_a_process_that_dies_is_no_traceback_of_the_pool() -> None:
    assert list(side_by_side(abs, [-1, 2, -3], 2)) == [1, 2, 3]
    with pytest.raises(QuireError, match="ended before its time"):
        list(side_by_side(os._exit, [3, 3], 2))


def test_a_model_that_fits_nowhere_says_why() -> None:
    hardware = replace(make_cost().hardware, memory=1000.0)
    case = replace(scenario(), cost=make_cost(hardware), settings=settings(num_blocks_override=None))
    with pytest.raises(UserError, match=r"no layout of 1 devices: .* does not fit"):
        layouts(case, 1)


def test_a_sweep_ends_where_more_requests_bring_no_more_tokens() -> None:
    result = run_layout(replace(scenario(), objectives={}), ParallelConfig())
    rates = [point.rate for point in result.points]
    assert rates == pytest.approx([rates[0] * 2**number for number in range(len(rates))])
    throughput = [point.tokens_per_second for point in result.points]
    assert throughput[-1] < 1.05 * throughput[-2]
    assert throughput[-2] > 1.5 * throughput[0]
    assert result.found_rate is None


def test_layouts_side_by_side_give_what_one_after_the_other_gives() -> None:
    case = replace(
        scenario(), source=SyntheticSource("alpaca", Arrivals(1.0, num_requests=12)), objectives={"ttft": 1e-3}
    )
    candidates = [ParallelConfig(), ParallelConfig(tp=2)]
    one, two = sweep(case, candidates), sweep(case, candidates, num_processes=2)
    assert [each.found_rate for each in one] == [each.found_rate for each in two]
    assert [[point.tpot for point in each.points] for each in one] == [
        [point.tpot for point in each.points] for each in two
    ]
    assert all(each.found_rate for each in one)


def test_a_sweep_begins_where_a_replica_is_busy_half_of_the_time() -> None:
    case = replace(scenario(), objectives={})
    outputs = [request.output_tokens for request in case.source.requests(None)]
    cost = case.cost
    token = cost.step_seconds(StepWork.of(make_plan([(511, 1)])))
    for dp in (1, 2):
        (first, *_) = run_layout(case, ParallelConfig(dp=dp)).points
        assert first.rate == pytest.approx(0.5 * dp * len(outputs) / sum(outputs) / token, rel=1e-3)


def test_a_point_is_what_a_user_sees_and_a_device_brings() -> None:
    metrics = Metrics(num_output_tokens=600, num_input_tokens=70, end=5.0)
    for tpot in (0.01, 0.01, 0.07):
        metrics.latencies["tpot"].add_value(tpot)
    metrics.latencies["ttft"].add_value(0.5)
    found = point(ParallelConfig(tp=2, pp=2, dp=3), 4.0, metrics)
    assert (found.ttft, found.tpot, found.tokens_per_second) == (0.5, pytest.approx(0.03), 120.0)
    assert found.interactivity == pytest.approx(1 / 0.03)
    assert found.tokens_per_device == 10.0


def test_the_front_holds_what_nothing_beats() -> None:
    def at(tpot: float, tokens: float) -> Point:
        return Point(ParallelConfig(), 1.0, tpot, 0.0, tokens, Metrics())

    best = [at(0.1, 100), at(0.02, 60), at(0.01, 10)]
    beaten = [at(0.1, 90), at(0.02, 10), at(0.03, 60), at(0.01, 9)]
    assert pareto_front([*beaten, *best]) == best
