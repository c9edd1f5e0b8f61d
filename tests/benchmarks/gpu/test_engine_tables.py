"""The arithmetic of the engine tables: what a step costs at least, which steps count, how long the card was idle."""

from __future__ import annotations

import pytest

from benchmarks.gpu.engine import GRAPH_SIZES, WHERE, decode_step_seconds, roofline_seconds
from benchmarks.gpu.limits import Ceilings, Work
from benchmarks.gpu.profiling import KernelEvent, breakdown
from benchmarks.gpu.shapes import QWEN3_8B
from benchmarks.gpu.step_log import STEPS, ModelCost, NotedStep, RecordingExecutor, Step
from benchmarks.gpu.workloads import Workload
from quire.config.options import EngineOptions
from quire.step import StepPlan, StepResult

COST = ModelCost(layer_parameters=1000, head_parameters=100, itemsize=2, kv_bytes=10, attention_width=7)


def step(num_seqs: int, finished: float, *, num_tokens: int | None = None) -> Step:
    return Step(num_tokens or num_seqs, num_seqs, num_seqs, 50 * num_seqs, 50.0 * num_seqs, finished - 1.0, finished)


def test_a_step_of_a_plan() -> None:
    plan = StepPlan(7, [1, 2, 3], [0, 20, 99], [4, 1, 1], [2, 3], [1, 2])
    noted = Step.of_plan(plan, 5.0)
    assert (noted.num_tokens, noted.num_seqs, noted.num_sampled) == (6, 3, 2)
    assert noted.kv_tokens == 4 + 21 + 100
    assert noted.num_pairs == (1 + 2 + 3 + 4) + 21 + 100
    assert not noted.is_decode
    assert Step.of_plan(StepPlan(8, [1], [4], [1], [1], [0]), 5.0).is_decode


def test_the_least_work_of_a_step() -> None:
    assert COST.work(step(2, 0.0)) == Work(2 * 1100 + 10 * (100 + 2), 2 * (1000 * 2 + 100 * 2) + 4 * 7 * 100)
    silent = Step(8, 1, 0, 8, 36.0, 0.0)
    assert COST.work(silent) == Work(2 * 1000 + 10 * 16, 2 * 8000 + 4 * 7 * 36)


def test_the_roofline_of_steps_is_the_sum_of_theirs() -> None:
    ceilings = Ceilings(1e3, 1e9)
    steps = [step(1, 0.0), step(2, 1.0)]
    assert roofline_seconds(steps, COST, ceilings) == pytest.approx(sum(COST.work(each).bytes for each in steps) / 1e3)


def test_only_steady_decode_steps_count() -> None:
    steps = [step(4, 0.0, num_tokens=40), step(4, 9.0), step(4, 10.0), step(4, 11.5), step(4, 12.5), step(3, 20.0)]
    assert decode_step_seconds(steps, 4) == 1.0
    with pytest.raises(ValueError, match="no two decode steps of 2"):
        decode_step_seconds(steps, 2)


def test_where_the_time_of_steps_goes() -> None:
    """The first quarter, in which the profiler starts, does not count."""
    early = [KernelEvent(0.0, 1.0, "early"), KernelEvent(50.0, 51.0, "early")]
    events = [KernelEvent(3.0, 4.0, "b"), KernelEvent(0.0, 1.0, "a"), KernelEvent(0.5, 0.75, "a")]
    events += [KernelEvent(1.5, 3.0, "b"), KernelEvent(9.0, 10.0, "a"), KernelEvent(10.0 + 1e-6, 11.0, "b")]
    later = [KernelEvent(event.start + 100.0, event.end + 100.0, event.name) for event in events]
    found = breakdown([*early, *later], num_steps=4)
    assert found["launches_per_step"] == 6 / 3
    assert found["busy"] == pytest.approx(1 - (0.5 + 5.0 + 1e-6) / 11.0)
    assert found["idle_between_steps"] == pytest.approx(5.5 / 11.0), "short gaps are those inside a graph"
    assert [row["name"] for row in found["kernels"]] == ["b", "a"]
    assert found["kernels"][0]["microseconds_per_step"] == pytest.approx(1e6 * 3.5 / 3, rel=1e-5)
    assert found["gaps"][0]["name"] == "b -> a"
    with pytest.raises(ValueError, match="no kernel"):
        breakdown([], num_steps=4)


class FakeExecutor:
    """Answers at once."""

    name = "fake"

    def execute(self, plan: StepPlan) -> NotedStep:
        class Done:
            def result(self) -> StepResult:
                return StepResult(plan.step_id, [[1]])

        return Done()  # type: ignore[return-value]


def test_steps_are_noted_around_the_executor() -> None:
    STEPS.clear()
    executor = RecordingExecutor(FakeExecutor())
    assert executor.name == "fake"
    future = executor.execute(StepPlan(3, [1], [0], [5], [1], [0]))
    assert [(each.num_tokens, each.finished) for each in STEPS] == [(5, 0.0)]
    assert future.result() == StepResult(3, [[1]])
    assert STEPS[0].finished >= STEPS[0].launched > 0
    executor.execute(StepPlan(4, [], [], [], [], []))
    assert len(STEPS) == 1, "a plan without tokens is no step"


def test_options_of_the_engine_exist() -> None:
    EngineOptions.from_keywords({**WHERE[False], "cuda_graphs": "full", "cuda_graph_sizes": GRAPH_SIZES})
    narrow = ModelCost.of_shape(QWEN3_8B, 1).work(step(1, 0.0)).bytes - 51 * 147_456
    assert narrow == QWEN3_8B.layer_parameters + QWEN3_8B.head_parameters


def test_the_shape_is_that_of_qwen3_8b() -> None:
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from quire.config.hf_config import load_model_config

    with TemporaryDirectory() as directory:
        path = str(QWEN3_8B.write(Path(directory)))
        config = load_model_config(path, dtype="auto", max_model_len=None, revision=None, config_only=True)
    assert config.dtype == "bfloat16"
    assert QWEN3_8B.layer_parameters + 2 * QWEN3_8B.head_parameters == 8_190_735_360
    assert config.resolved_shape().parameters() == 8_190_735_360
    assert QWEN3_8B.kv_bytes * QWEN3_8B.num_layers == 147_456


def test_prompts_differ_between_requests_and_seeds() -> None:
    work = Workload(3, 10, 5)
    prompts = work.prompts(1000, seed=1)
    assert [len(prompt) for prompt in prompts] == [10] * 3
    assert len({tuple(prompt) for prompt in prompts + work.prompts(1000, seed=2)}) == 6
    assert prompts == work.prompts(1000, seed=1)
