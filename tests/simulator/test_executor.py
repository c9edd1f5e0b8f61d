"""The two timelines, host and device, step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.clock import VirtualClock
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.sampling_params import SamplingParams
from quire.simulator.executor import SimulatedExecutor
from quire.simulator.hardware import Hardware, find
from quire.simulator.work import StepWork
from quire.step import HostTransfers, NewSequence, SequenceSampling, StepPlan
from tests.simulator.making import make_cost
from tests.simulator.test_work import make_plan

HOST, EACH = 3e-3, 1e-3
HARDWARE = replace(find("a100-40g"), host_overhead=HOST, host_overhead_per_sequence=EACH, pcie_latency=1e-5)


class Bench:
    """An executor with a pool, and what its plans cost by hand."""

    def __init__(self, queue_depth: int = 1, hardware: Hardware = HARDWARE) -> None:
        self.cost = make_cost(hardware)
        self.clock = VirtualClock()
        self.executor = SimulatedExecutor(self.cost, self.clock, queue_depth=queue_depth)
        groups, per_group = group_layers(self.executor.load_model(), 16)
        self.layout = KVCacheLayout(16, 100, groups, per_group, 50)
        self.executor.allocate(self.layout)

    def model(self, plan: StepPlan) -> float:
        return self.cost.step_seconds(StepWork.of(plan))

    @property
    def block_copy(self) -> float:
        """One copy for each of the four layers, and the bytes of all."""
        bytes_per_second = HARDWARE.pcie_bandwidth * HARDWARE.factors.pcie
        return 4 * HARDWARE.pcie_latency + self.layout.block_bytes / bytes_per_second


def test_one_step_at_a_time_waits_for_the_host_before_each() -> None:
    bench = Bench()
    plan = make_plan([(10, 1), (20, 1)])
    for number in (1, 2, 3):
        bench.executor.execute(plan).result()
        assert bench.clock.now() == pytest.approx(number * (HOST + 2 * EACH + bench.model(plan)))
    assert bench.executor.busy_seconds == pytest.approx(3 * bench.model(plan))


def test_a_step_after_idle_time_and_a_sequence_that_begins_take_longer() -> None:
    """Idle time is more than five milliseconds since the end of the step before."""
    slow = replace(HARDWARE, wake_overhead=7e-3, host_overhead_per_new_sequence=2e-3)
    for pause, woken in ((4e-3, 0.0), (6e-3, 7e-3)):
        bench = Bench(hardware=slow)
        sampling = SequenceSampling(SamplingParams(), 0, [], [])
        beginning = [NewSequence(9, [1], 1, [[5]], sampling), NewSequence(8, [1], 1, [[6]], sampling)]
        plan = make_plan([(0, 1), (0, 1)], new_sequences=beginning)
        bench.executor.execute(plan).result()
        first = HOST + 2 * EACH + 2 * 2e-3 + bench.model(plan)
        assert bench.clock.now() == pytest.approx(first)
        bench.clock.advance(pause)
        after = make_plan([(1, 1)])
        bench.executor.execute(after).result()
        assert bench.clock.now() == pytest.approx(first + pause + HOST + EACH + bench.model(after) + woken)
        assert bench.executor.busy_seconds == pytest.approx(bench.model(plan) + bench.model(after) + woken)


def test_with_two_in_flight_the_host_plans_while_the_device_computes() -> None:
    bench = Bench(queue_depth=2)
    long = make_plan([(100_000_000, 1)])
    model, host = bench.model(long), HOST + EACH
    assert model > 2 * host, "else the device would not be the one to wait for"
    waiting = [bench.executor.execute(long), bench.executor.execute(long)]
    for number in range(1, 5):
        waiting.pop(0).result()
        assert bench.clock.now() == pytest.approx(host + number * model)
        waiting.append(bench.executor.execute(long))


def test_a_slow_host_is_the_limit_even_with_two_in_flight() -> None:
    bench = Bench(queue_depth=2)
    short = make_plan([(1, 1)])
    host = HOST + EACH
    assert bench.model(short) < host
    waiting = [bench.executor.execute(short), bench.executor.execute(short)]
    waiting.pop(0).result()
    for number in range(3, 8):
        waiting.append(bench.executor.execute(short))
        waiting.pop(0).result()
        assert bench.clock.now() == pytest.approx(number * host)


def test_swapping_runs_beside_the_model_and_delays_the_next_step() -> None:
    bench = Bench()
    plan = make_plan([(10, 1)], transfers=HostTransfers([(block, block) for block in range(1, 21)]))
    swap = 20 * bench.block_copy
    assert swap > bench.model(plan)
    bench.executor.execute(plan).result()
    host = HOST + EACH
    assert bench.clock.now() == pytest.approx(host + bench.model(plan))  # the result does not wait for the copies
    after = make_plan([(11, 1)])
    bench.executor.execute(after).result()
    begin = max(2 * host + bench.model(plan), host + swap)
    assert bench.clock.now() == pytest.approx(begin + bench.model(after))
    assert bench.executor.swap_seconds == pytest.approx(swap)


def test_the_model_waits_for_what_it_overwrites() -> None:
    bench = Bench()
    plan = make_plan([(10, 1)], transfers=HostTransfers([(5, 1), (6, 2)]), new_blocks={0: [[6]]})
    bench.executor.execute(plan).result()
    assert bench.clock.now() == pytest.approx(HOST + EACH + 2 * bench.block_copy + bench.model(plan))


def test_a_plan_that_only_swaps_in_ends_with_the_copies() -> None:
    bench = Bench()
    bench.executor.execute(make_plan([], transfers=HostTransfers(swap_in=[(1, 5), (2, 6), (3, 7)]))).result()
    assert bench.clock.now() == pytest.approx(HOST + 3 * bench.block_copy)


def test_costs_of_preemption_are_those_of_the_model() -> None:
    bench = Bench()
    costs = bench.executor.measure_preemption_costs()
    assert costs.seconds_per_block == pytest.approx(bench.block_copy)
    assert costs.seconds_per_token == pytest.approx(bench.model(make_plan([(0, 1024)])) / 1024, rel=0.05)
