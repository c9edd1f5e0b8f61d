"""The simulator plans what the engine plans: the same requests at the same steps, a real worker on one side.

Both sides get a request before the step of the same number, so that nothing depends on how long steps take. What a
model generates is not simulated: plans are compared in everything but the values of generated tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.clock import SystemClock
from quire.config.engine import EngineConfig
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.engine.core import EngineCore
from quire.engine.messages import AddRequest
from quire.executors.interface import Executor
from quire.executors.local import LocalExecutor
from quire.kv_cache.layout import block_bytes, group_layers
from quire.kv_cache.spec import layer_specs
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.simulator.cost import CostModel, Precision
from quire.simulator.executor import SimulatedExecutor
from quire.simulator.hardware import find
from quire.simulator.replica import EngineSettings, Replica
from quire.simulator.tokens import prompt_tokens
from quire.simulator.trace import TraceRequest
from quire.step import StepPlan

VOCABULARY = 89
"""Few enough tokens for the real model, and a prime, so that prompts that differ go on differing."""
NUM_BLOCKS, MAX_NUM_SEQS, BUDGET, NUM_HOST_BLOCKS = 26, 5, 48, 12
REQUESTS = [
    (0, TraceRequest(0.0, 60, 30)),
    (0, TraceRequest(0.0, 35, 25, "examples", 32)),
    (1, TraceRequest(0.0, 40, 20, "examples", 32)),  # waits for the prefix that the one before computes
    (3, TraceRequest(0.0, 20, 18, n=2)),
    (4, TraceRequest(0.0, 90, 22)),
    (9, TraceRequest(0.0, 50, 12, "examples", 32)),
    (12, TraceRequest(0.0, 33, 10, priority=-3)),  # goes before the requests that wait
    (70, TraceRequest(0.0, 45, 9, "examples", 32)),
]
"""(steps made before, the request)"""


class Recorder:
    """An executor that notes every plan before another one runs it."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.plans: list[StepPlan] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def execute(self, plan: StepPlan) -> Any:
        self.plans.append(comparable(plan))
        return self._executor.execute(plan)


def comparable(plan: StepPlan) -> StepPlan:
    """A plan with its lists copied, and in place of tokens their number."""
    values = {name: getattr(plan, name) for name in StepPlan.__struct_fields__}
    values = {name: list(value) if isinstance(value, list) else value for name, value in values.items()}
    values["new_blocks"] = {seq_id: [list(ids) for ids in groups] for seq_id, groups in plan.new_blocks.items()}
    values["new_sequences"] = [
        (new.seq_id, len(new.token_ids), new.num_prompt_tokens, [list(table) for table in new.block_ids])
        for new in plan.new_sequences
    ]
    values["forks"] = [(fork.parent, fork.child, fork.token_ids and len(fork.token_ids)) for fork in plan.forks]
    return StepPlan(**values)


def engine_plans(config: EngineConfig) -> list[StepPlan]:
    """The plans of the real engine: its own core, the worker with the bundled model, the machine's clock."""
    recorder = Recorder(LocalExecutor(config))
    core = EngineCore(config, recorder, SystemClock())
    waiting = list(enumerate(REQUESTS))
    num_steps = 0
    while waiting or core.has_work:
        while waiting and (waiting[0][1][0] <= num_steps or not core.has_work):
            number, (_, request) = waiting.pop(0)
            core.handle(AddRequest(engine_request(number, request, config)))
        assert core.step().rejections == []
        num_steps += 1
    core.shutdown()
    return recorder.plans


def engine_request(number: int, request: TraceRequest, config: EngineConfig) -> EngineRequest:
    """Under `fcfs` an engine takes no priority."""
    tokens = prompt_tokens(number, request.input_tokens, request.prefix_group, request.prefix_tokens)
    return EngineRequest(
        request_id=f"engine-{number}",
        prompt_token_ids=[token % VOCABULARY for token in tokens],
        params=SamplingParams(n=request.n, temperature=1.0, ignore_eos=True),
        max_tokens=request.output_tokens,
        seed=number,
        priority=request.priority if config.scheduler.scheduling_policy == "priority" else 0,
    )


def simulated_plans(config: EngineConfig, settings: EngineSettings) -> list[StepPlan]:
    """The plans of the simulator, for the same model on a device that the engine never saw."""
    shape = config.model.resolved_shape()
    cost = CostModel(shape, find("h100"), precision=Precision.of(shape, "float32", "float32"))
    recorders: list[Recorder] = []

    def make_executor(cost: CostModel, clock: Any, queue_depth: int) -> Executor:
        recorders.append(Recorder(SimulatedExecutor(cost, clock, queue_depth=queue_depth)))
        return recorders[-1]

    replica = Replica(cost, settings, make_executor=make_executor)
    core, waiting, num_steps = replica.core, list(REQUESTS), 0
    while waiting or core.has_work:
        while waiting and (waiting[0][0] <= num_steps or not core.has_work):
            replica.offer(waiting.pop(0)[1])
        replica.step()
        num_steps += 1
    assert replica.finish_run().num_finished == len(REQUESTS)
    return recorders[0].plans


CASES = [
    (1, "recompute", True, "priority"),
    (2, "recompute", False, "priority"),
    (1, "swap", True, "priority"),
    (2, "swap", True, "priority"),
    (1, "recompute", True, "fcfs"),
]


@pytest.mark.parametrize(("depth", "mode", "caching", "policy"), CASES)
def test_plans_are_the_engines(depth: int, mode: str, caching: bool, policy: str) -> None:
    options = EngineOptions(
        load_format="dummy",
        block_size=16,
        num_blocks_override=NUM_BLOCKS,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=BUDGET,
        max_prefill_chunk=32,
        queue_depth=depth,
        scheduling_policy=policy,
        preemption_mode=mode,
        enable_prefix_caching=caching,
        kv_cache_dtype="float32",
        num_threads=1,
    )
    config = resolve(options)
    settings = EngineSettings(
        max_model_len=config.model.max_model_len,
        num_blocks_override=NUM_BLOCKS,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=BUDGET,
        max_prefill_chunk=32,
        queue_depth=depth,
        scheduling_policy=policy,
        preemption_mode=mode,
        enable_prefix_caching=caching,
        swap_space=NUM_HOST_BLOCKS * bytes_of_a_block(config),
    )
    if mode == "swap":
        config = replace(config, cache=replace(config.cache, swap_space=settings.swap_space))
    expected, found = engine_plans(config), simulated_plans(config, settings)
    for number, (engine, simulated) in enumerate(zip(expected, found, strict=False)):
        assert simulated == engine, f"plan {number} differs"
    assert len(found) == len(expected)
    assert any(plan.swap_out for plan in expected) == (mode == "swap")
    assert any(plan.forks for plan in expected)
    if policy == "priority":  # without, these requests come in an order in which all fit
        assert sum(len(plan.new_sequences) for plan in expected) > len(REQUESTS), "no request was preempted"


def bytes_of_a_block(config: EngineConfig) -> int:
    groups, layers_per_group = group_layers(layer_specs(config.model), 16)
    return block_bytes(groups, layers_per_group)
