"""Plans of the simulator and the engine where requests branch and end early: beams, samples, aborts, time limits.

As in test_fidelity.py; but both engine cores read a clock that moves by a second a step, so that time limits and
ageing fall on the same steps, and where beams go depends on scores, so that the simulator gets those of the real model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from quire.clock import VirtualClock
from quire.config.engine import EngineConfig
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.engine.core import EngineCore
from quire.engine.messages import Abort, AddRequest
from quire.executors.interface import Executor
from quire.executors.local import LocalExecutor
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.simulator.cost import CostModel, Precision
from quire.simulator.executor import SimulatedExecutor
from quire.simulator.hardware import find
from quire.simulator.replica import EngineSettings
from quire.simulator.tokens import prompt_tokens
from quire.step import Candidates, StepPlan, StepResult
from tests.fakes.transfers import copies
from tests.simulator.test_fidelity import (
    BUDGET,
    MAX_NUM_SEQS,
    VOCABULARY,
    Recorder,
    bytes_of_a_block,
)

Scores = dict[int, dict[int, Candidates]]
"""step_id -> index among its samples -> what a beam can go on with."""


@dataclass(frozen=True)
class Arrival:
    """step: steps made before. sampling: of SamplingParams, besides what all have."""

    step: int
    input_tokens: int
    output_tokens: int
    group: str | None = None
    shared: int = 0
    priority: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)


def beams(width: int) -> dict[str, Any]:
    return {"n": width, "use_beam_search": True, "temperature": 0.0}


REQUESTS = [
    Arrival(0, 60, 30),
    Arrival(0, 35, 90, "examples", 32),
    Arrival(1, 40, 80, "examples", 32),
    Arrival(2, 30, 60, sampling=beams(3)),
    Arrival(3, 20, 18, sampling={"n": 2, "best_of": 3}),
    Arrival(4, 80, 70),
    Arrival(6, 50, 40, sampling={"timeout_s": 30.5}),  # ends while it runs
    Arrival(7, 70, 40, priority=5, sampling={"timeout_s": 1.5}),  # ends while it waits
    Arrival(12, 33, 10, priority=-3),
    Arrival(30, 45, 9, "examples", 32),
    Arrival(40, 45, 16, sampling=beams(4)),
]
ABORTS = [(20, Abort("request-0")), (25, Abort("request-4", 1)), (60, Abort("request-10"))]


class Noted(Future[StepResult]):
    """A result, of which something is done when it is taken."""

    def __init__(self, inner: Future[StepResult], change: Callable[[StepResult], StepResult]) -> None:
        super().__init__()
        self._inner, self._change = inner, change

    def result(self, timeout: float | None = None) -> StepResult:
        return self._change(self._inner.result(timeout))


class Noting(Recorder):
    """Keeps the scores of the real model as well."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self.scores: Scores = {}

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        def note(result: StepResult) -> StepResult:
            self.scores[plan.step_id] = dict(result.candidates)
            return result

        return Noted(super().execute(plan), note)


class Replaying(Recorder):
    """Puts them in the place of those that the simulator draws, of which there are as many."""

    def __init__(self, executor: Executor, scores: Scores) -> None:
        super().__init__(executor)
        self._scores = scores

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        def put(result: StepResult) -> StepResult:
            wanted = self._scores[plan.step_id]
            drawn = {index: len(candidates.token_ids) for index, candidates in result.candidates.items()}
            assert drawn == {index: len(candidates.token_ids) for index, candidates in wanted.items()}
            result.candidates.update(wanted)
            return result

        return Noted(super().execute(plan), put)


def engine_request(number: int, arrival: Arrival, vocabulary: int) -> EngineRequest:
    tokens = prompt_tokens(number, arrival.input_tokens, arrival.group, arrival.shared)
    return EngineRequest(
        request_id=f"request-{number}",
        prompt_token_ids=[token % vocabulary for token in tokens],
        params=SamplingParams(**{"temperature": 1.0, "ignore_eos": True, "detokenize": False, **arrival.sampling}),
        max_tokens=arrival.output_tokens,
        seed=number,
        priority=arrival.priority,
    )


def serve(core: EngineCore, clock: VirtualClock, vocabulary: int) -> dict[str, list[str]]:
    """Play the script; for each request the reasons why its sequences ended."""
    ends: dict[str, list[str]] = {}
    arrivals, aborts, num_steps = list(enumerate(REQUESTS)), list(ABORTS), 0
    while arrivals or aborts or core.has_work:
        while arrivals and arrivals[0][1].step <= num_steps:
            core.handle(AddRequest(engine_request(*arrivals.pop(0), vocabulary)))
        while aborts and aborts[0][0] <= num_steps:
            core.handle(aborts.pop(0)[1])
        outputs = core.step()
        assert outputs.rejections == []
        for update in outputs.updates:
            if update.finish_reason is not None:
                ends.setdefault(update.request_id, []).append(str(update.finish_reason))
        clock.advance(1.0)
        num_steps += 1
    core.scheduler.check()
    assert core.stats().num_used_blocks == 0
    return ends


def simulated_core(config: EngineConfig, settings: EngineSettings, scores: Scores) -> tuple[EngineCore, VirtualClock]:
    """The executor has a clock of its own: what steps cost moves nothing here."""
    shape = config.model.resolved_shape()
    cost = CostModel(shape, find("h100"), precision=Precision.of(shape, "float32", "float32"))
    clock = VirtualClock()
    executor = Replaying(SimulatedExecutor(cost, VirtualClock(), queue_depth=settings.queue_depth), scores)
    return EngineCore(settings.config(cost), executor, clock), clock


@pytest.mark.parametrize(("depth", "mode"), [(1, "recompute"), (2, "recompute"), (1, "swap"), (2, "swap")])
def test_plans_are_the_engines(depth: int, mode: str) -> None:
    limits = {
        "num_blocks_override": 20,
        "max_num_seqs": MAX_NUM_SEQS + 2,
        "max_num_batched_tokens": BUDGET,
        "max_prefill_chunk": 32,
        "queue_depth": depth,
        "preemption_mode": mode,
    }
    config = resolve(
        EngineOptions(load_format="dummy", block_size=16, kv_cache_dtype="float32", num_threads=1, **limits)
    )
    settings = EngineSettings(
        max_model_len=config.model.max_model_len, swap_space=40 * bytes_of_a_block(config), **limits
    )
    if mode == "swap":
        config = replace(config, cache=replace(config.cache, swap_space=settings.swap_space))
    clock, real = VirtualClock(), Noting(LocalExecutor(config))
    expected_ends = serve(EngineCore(config, real, clock), clock, VOCABULARY)
    core, clock = simulated_core(config, settings, real.scores)
    ends = serve(core, clock, 1 << 62)
    found: list[StepPlan] = core._executor.plans  # type: ignore[attr-defined]
    for number, (engine, simulated) in enumerate(zip(real.plans, found, strict=False)):
        assert simulated == engine, f"plan {number} differs"
    assert len(found) == len(real.plans)
    assert ends == expected_ends
    # Everything that the script is about did happen.
    assert {reason for reasons in ends.values() for reason in reasons} == {"length", "timeout"}
    assert ends["request-6"] == ends["request-7"] == ["timeout"]
    assert not {"request-0", "request-10"} & set(ends)
    assert len(ends["request-3"]) == 3
    assert any(plan.beam_reorders for plan in found), "no beam overtook another"
    assert any(plan.token_overrides for plan in found)
    assert any(plan.block_copies for plan in found)
    assert core.stats().preemptions_total > 0
    assert any(copies(plan).swap_in for plan in found) == (mode == "swap")
    assert core.stats().prefix_cache_hits_total > 0
