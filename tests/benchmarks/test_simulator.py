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
from quire.config.model_shape import ModelShape
from quire.config.parallel import ParallelConfig
from quire.engine.core import EngineCore
from quire.engine.step_log import StepLog, StepLogHeader, StepRecord, read_step_log
from quire.simulator.cost import CostModel, Precision
from quire.simulator.executor import SimulatedExecutor
from quire.simulator.hardware import Hardware, find
from quire.simulator.jitter import Jitter
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


JITTER = Jitter(
    single=((0.1, 0.8), (0.3, 0.9), (0.6, 0.98), (0.9, 1.1), (0.99, 1.4), (1.0, 1.7)),
    chunks=((0.3, 0.9), (0.7, 1.0), (0.95, 1.1), (1.0, 1.4)),
    lasting=((0.1, 0.2), (1.0, 0.5)),
    stalls=((0.05, 0.2),),
)


def measured_runs(
    true: Hardware, shape: ModelShape, path: Path, seconds: float
) -> tuple[StepLogHeader, list[StepRecord], list[predict.Run]]:
    """Runs of two workloads in turns on an engine whose steps cost what a cost model says."""
    cost = CostModel(shape, true, ParallelConfig(), Precision.of(shape))
    config = EngineSettings(**{**predict.LIMITS, "queue_depth": 1}).config(cost)
    clock, log = VirtualClock(), path / "steps.jsonl"
    core = EngineCore(config, Device(cost, clock, seed=77), clock, observers=[StepLog(config, log, clock)])
    runs = [
        predict.drive(core, predict.requests_of(workload, seconds, seed), clock, clock.advance, 1000)
        for seed, workload in enumerate(("sharegpt:0.6", "alpaca:4", "sharegpt:0.6"))
    ]
    core.shutdown()
    header, records = read_step_log(log)
    assert sum(len(predict.steps_of(run, records)) for run in runs) == len(records)
    return header, records, runs


SHAPE = replace(find_shape("opt-125m"), dtype="bfloat16", expert_dtype="bfloat16")
TRUE = replace(
    find(predict.BASE).with_factors(compute=0.5, bandwidth=0.9, attention_compute=0.15, attention_bandwidth=0.5),
    half_rows=5.0,
    token_overhead=2e-5,
    sequence_overhead=4e-5,
    host_overhead=8e-4,
    host_overhead_per_sequence=3e-5,
    host_overhead_per_new_sequence=1e-3,
    wake_overhead=5e-3,
    jitter=Jitter(),
)


@pytest.mark.long
def test_what_is_predicted_is_what_happens(tmp_path: Path) -> None:
    """An engine whose steps cost what a cost model with other numbers than the profile's says. The method has to find
    those numbers in a log of one workload, and to predict the latencies of another."""
    header, records, runs = measured_runs(TRUE, SHAPE, tmp_path, 150.0)
    result = predict.compare(SHAPE, find(predict.BASE), header, records, runs)
    assert result["num_requests"] == len(runs[1].requests) > 100
    assert result["num_left_out"] == 0
    assert result["step_errors"]["median"] < 0.01
    for name, row in result["rows"].items():
        # Of 600 requests the P99 is the sixth largest, which a step more or less in front of it moves.
        tolerance = 0.08 if name.endswith("P99") else 0.03
        assert row["predicted"] == pytest.approx(row["measured"], rel=tolerance), name
        assert row["without_jitter"] == pytest.approx(row["measured"], rel=tolerance), name
        assert row["low"] <= row["measured"] <= row["high"]


@pytest.mark.long
def test_jitter_is_what_the_tail_needs(tmp_path: Path) -> None:
    """An engine whose steps scatter, slowly: the usual time of steps predicts means and not tails, its jitter both."""
    header, records, runs = measured_runs(replace(TRUE, jitter=JITTER), SHAPE, tmp_path, 150.0)
    rows = predict.compare(SHAPE, find(predict.BASE), header, records, runs)["rows"]
    for name, row in rows.items():
        # Of 600 requests: the measured run is one draw of a scatter that lasts a second.
        tolerance = 0.1 if name.endswith("P99") else 0.05
        assert row["predicted"] == pytest.approx(row["measured"], rel=tolerance), name
    assert rows["TPOT P99"]["without_jitter"] < 0.93 * rows["TPOT P99"]["measured"]


@pytest.mark.long
def test_only_quiet_runs_count(tmp_path: Path) -> None:
    """A run is disturbed when a tenth of its steps with single tokens took 1.5 times as long as in the quietest run."""
    header, records, runs = measured_runs(TRUE, SHAPE, tmp_path, 10.0)
    cost = CostModel(SHAPE, TRUE, precision=Precision.of(SHAPE, header.weights, header.kv_cache_dtype))

    def slow_down(run: int, every: int, factor: float) -> None:
        steps = [step for step in predict.steps_of(runs[run], records) if max(step.tokens, default=0) == 1]
        for step in steps[::every]:
            step.seconds *= factor

    assert predict.quiet(runs, records, cost) == [True, True, True]
    slow_down(0, every=20, factor=5.0)
    assert predict.quiet(runs, records, cost) == [True, True, True], "one in twenty"
    slow_down(0, every=5, factor=2.0)
    assert predict.quiet(runs, records, cost) == [False, True, True]
    assert predict.compare(SHAPE, find(predict.BASE), header, records, runs)["num_left_out"] == 1
    slow_down(1, every=1, factor=2.0)
    assert predict.quiet(runs, records, cost) == [False, False, True], "all of them, and evenly"
    with pytest.raises(SystemExit, match="something else held the cores"):
        predict.compare(SHAPE, find(predict.BASE), header, records, runs)


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
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
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
