"""The scripts of benchmarks/simulator, on a virtual clock, and the commands of the pages that use them."""

from __future__ import annotations

import argparse
import re
import shlex
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulator import predict, scale
from quire.cli import calibrate, plan, simulate
from quire.clock import VirtualClock
from quire.engine.core import EngineCore
from quire.executors.step_log import StepLog, read_step_log
from quire.simulator.cost import CostModel, Precision
from quire.simulator.executor import SimulatedExecutor
from quire.simulator.hardware import find
from quire.simulator.layout import Layout
from quire.simulator.metrics import Metrics
from quire.simulator.replica import EngineSettings
from quire.simulator.shape import find_shape
from quire.simulator.trace import TraceRequest
from quire.step import StepPlan, StepResult
from tests.architecture.source import ROOT


class Device(SimulatedExecutor):
    """A real engine's executor as far as anybody can tell: when it answers, the time is over."""

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        future.set_result(super().execute(plan).result())
        return future


def test_what_is_predicted_is_what_happens(tmp_path: Path) -> None:
    """An engine whose steps cost what a cost model with other numbers than the profile's says. The method has to find
    those numbers in a log of one workload, and to predict the latencies of another."""
    shape = replace(find_shape("opt-125m"), dtype="bfloat16", expert_dtype="bfloat16")
    base = find(predict.BASE)
    true = replace(
        base.with_factors(compute=0.5, bandwidth=0.9, attention_compute=0.15, attention_bandwidth=0.5),
        half_rows=5.0,
        token_overhead=2e-5,
        sequence_overhead=4e-5,
        host_overhead=8e-4,
        host_overhead_per_sequence=3e-5,
    )
    precision = Precision.of(shape)
    cost = CostModel(shape, true, Layout(), precision)
    config = EngineSettings(**{**predict.LIMITS, "queue_depth": 1}).config(cost)
    clock, log = VirtualClock(), tmp_path / "steps.jsonl"
    core = EngineCore(config, StepLog(Device(cost, clock), config, log, clock), clock)
    workloads = ("sharegpt:1", "alpaca:4", "sharegpt:1")
    runs = [
        predict.drive(core, predict.requests_of(workload, 40.0, seed), clock, clock.advance, 1000)
        for seed, workload in enumerate(workloads)
    ]
    core.shutdown()
    header, records = read_step_log(log)
    assert sum(len(predict.steps_of(run, records)) for run in runs) == len(records)
    steps = [*predict.steps_of(runs[0], records), *predict.steps_of(runs[2], records)]
    result = predict.compare(shape, base, header, steps, runs[1])
    assert result["num_requests"] == len(runs[1].requests) > 100
    assert result["step_errors"]["median"] < 0.01
    for name, row in result["rows"].items():
        # Of 160 requests the P99 is one or two, which a step more or less in front of them moves.
        assert row["ratio"] == pytest.approx(1.0, abs=0.08 if name.endswith("P99") else 0.03), name
    assert set(predict.summary([result, result])["median"]) == set(predict.QUANTITIES)


def test_requests_are_handed_over_as_they_arrive() -> None:
    """Times are those of the requests, not of the first one; a single token has no time per further token."""
    shape = find_shape("opt-125m")
    cost = CostModel(shape, find("l4"))
    clock = VirtualClock()
    core = EngineCore(EngineSettings(**predict.LIMITS).config(cost), Device(cost, clock), clock)
    requests = [TraceRequest(5.0, 10, 1), TraceRequest(5.0, 20, 3), TraceRequest(9.0, 10, 4)]
    run = predict.drive(core, requests, clock, clock.advance, 1000)
    assert len(run.served) == 3
    assert clock.now() > 9.0
    assert all(0 < each.ttft < 1.0 for each in run.served)
    assert [each.tpot is None for each in run.served] == [True, False, False]
    core.shutdown()


def options(*flags: str) -> argparse.Namespace:
    return scale.build_parser().parse_args(["--model", "deepseek-v3", "--gpu", "h200", "--price", "2", *flags])


def test_a_fleet_is_whole_groups_with_headroom() -> None:
    metrics = Metrics(num_blocks=1, num_finished=10, num_input_tokens=1000, num_output_tokens=3000)
    one = scale.make_replica(options("--tp", "8"))
    fleet = scale.plan_fleet(one.cost, 10.0, metrics, options("--tp", "8", "--requests-per-hour", "360000"))
    assert (fleet.groups, fleet.devices, fleet.nodes) == (13, 104, 13)  # 100 requests/s over 8 each
    assert fleet.share == pytest.approx(100 / 13)
    assert (fleet.input_tokens, fleet.output_tokens) == (10_000, 30_000)
    assert fleet.cost_per_hour == 208
    assert fleet.cost_per_million_output == pytest.approx(208 / (3600 * 30_000) * 1e6)
    assert fleet.cost_per_million == pytest.approx(0.75 * fleet.cost_per_million_output)
    wide = options("--ep", "32", "--headroom", "0", "--requests-per-hour", "360000")
    shared = scale.make_replica(wide)
    assert (shared.cost.layout.dp, shared.cost.layout.ep) == (32, 32)
    fleet = scale.plan_fleet(shared.cost, 2.0, metrics, wide)
    assert (fleet.groups, fleet.devices, fleet.nodes) == (2, 64, 8)  # 64 requests/s a group
    assert fleet.share == pytest.approx(100 / 64)


COMMANDS = {
    "quire plan": plan.build_parser().parse,
    "quire simulate calibrate": calibrate.build_parser().parse,
    "quire simulate": simulate.build_parser().parse,
    "python benchmarks/simulator/scale.py": scale.build_parser().parse_args,
    "python benchmarks/simulator/predict.py": predict.build_parser().parse_args,
}


def commands(page: str) -> list[str]:
    """The command lines of a page's code blocks; a line that ends in a backslash goes on in the next."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith(("quire plan", "quire simulate", "python benchmarks/simulator"))]


@pytest.mark.parametrize("page", ["docs/scale.md", "docs/calibration.md"])
def test_the_commands_of_the_page_can_be_given(page: str) -> None:
    found = commands(page)
    assert len(found) >= 4
    for line in found:
        name = max((name for name in COMMANDS if line.startswith(name)), key=len)
        parsed = COMMANDS[name](shlex.split(line.removeprefix(name)))
        if name == "quire simulate" and not str(parsed.gpu).endswith(".json"):
            simulate.make_scenario(parsed)  # model, layout and workload exist and fit each other
        if name.endswith("scale.py"):
            scale.make_replica(parsed)
