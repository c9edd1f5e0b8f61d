"""The simulator plans what the engine plans: the same requests at the same steps, a real worker on one side.

Both sides get a request before the step of the same number, so that nothing depends on how long steps take. What a
model generates is not simulated: plans are compared in everything but the values of generated tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.clock import SystemClock
from quire.config.engine import EngineConfig
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.config.vision import read_vision
from quire.engine.core import EngineCore
from quire.engine.messages import AddRequest
from quire.executors.interface import Executor
from quire.executors.local import LocalExecutor
from quire.kv_cache.layout import block_bytes, group_layers
from quire.kv_cache.spec import layer_specs
from quire.prompt_image import PromptImage
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.simulator.cost import CostModel, Precision
from quire.simulator.executor import SimulatedExecutor
from quire.simulator.hardware import find
from quire.simulator.replica import EngineSettings, Replica
from quire.simulator.tokens import prompt_tokens
from quire.simulator.tower import TowerCost, placed, with_images
from quire.simulator.trace import TraceImage, TraceRequest
from quire.step import StepPlan
from tests.fakes.transfers import copies

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
Planned = tuple[int, TraceRequest]
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
        (new.seq_id, len(new.token_ids), new.num_prompt_tokens, [list(table) for table in new.block_ids], new.images)
        for new in plan.new_sequences
    ]
    if plan.images is not None:  # without pixels
        slices = [(part.key, part.num_layers, part.rank, part.image is None) for part in plan.images.slices]
        values["images"] = list(plan.images.dropped), slices
    values["forks"] = [(fork.parent, fork.child, fork.token_ids and len(fork.token_ids)) for fork in plan.forks]
    return StepPlan(**values)


def engine_plans(config: EngineConfig, requests: Sequence[Planned] = REQUESTS) -> list[StepPlan]:
    """The plans of the real engine: its own core, the worker with a model of the package, the machine's clock."""
    recorder = Recorder(LocalExecutor(config))
    core = EngineCore(config, recorder, SystemClock())
    waiting = list(enumerate(requests))
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
    tokens, images = with_images(number, tokens, request), list[PromptImage]()
    if request.images:
        cost = tower_of(config)
        side = cost.vision.patch_size * cost.vision.merge_size
        for image in placed(number, request, cost):
            size = side, side * image.num_tokens
            pixels = np.random.default_rng(image.key[0]).integers(0, 256, (*size, 3), np.uint8).tobytes()
            images.append(msgspec.structs.replace(image, pixels=pixels, size=size))
    return EngineRequest(
        request_id=f"engine-{number}",
        prompt_token_ids=[token % VOCABULARY for token in tokens],
        params=SamplingParams(n=request.n, temperature=1.0, ignore_eos=True),
        max_tokens=request.output_tokens,
        seed=number,
        priority=request.priority if config.scheduler.scheduling_policy == "priority" else 0,
        images=images,
    )


def cost_of(config: EngineConfig) -> CostModel:
    shape, vision = config.model.resolved_shape(), None
    if config.model.vision is not None:
        vision = read_vision(config.model.architecture, config.model.vision, shape.hidden, "")
    return CostModel(shape, find("h100"), precision=Precision.of(shape, "float32", "float32"), vision=vision)


def tower_of(config: EngineConfig) -> TowerCost:
    tower = cost_of(config).tower
    assert tower is not None
    return tower


def simulated_plans(
    config: EngineConfig, settings: EngineSettings, requests: Sequence[Planned] = REQUESTS
) -> list[StepPlan]:
    """The plans of the simulator, for the same model on a device that the engine never saw."""
    cost = cost_of(config)
    recorders: list[Recorder] = []

    def make_executor(cost: CostModel, clock: Any, queue_depth: int) -> Executor:
        recorders.append(Recorder(SimulatedExecutor(cost, clock, queue_depth=queue_depth)))
        return recorders[-1]

    replica = Replica(cost, settings, make_executor=make_executor)
    core, waiting, num_steps = replica.core, list(requests), 0
    while waiting or core.has_work:
        while waiting and (waiting[0][0] <= num_steps or not core.has_work):
            replica.offer(waiting.pop(0)[1])
        replica.step()
        num_steps += 1
    assert replica.finish_run().num_finished == len(requests)
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
    assert any(copies(plan).swap_out for plan in expected) == (mode == "swap")
    assert any(plan.forks for plan in expected)
    if policy == "priority":  # without, these requests come in an order in which all fit
        assert sum(len(plan.new_sequences) for plan in expected) > len(REQUESTS), "no request was preempted"


IMAGES = [
    (0, TraceRequest(0.0, 60, 8, images=(TraceImage(20), TraceImage(9, "cat")))),
    (0, TraceRequest(0.0, 30, 20)),
    (1, TraceRequest(0.0, 50, 6, "examples", 32, images=(TraceImage(9, "cat"),))),  # its features are there
    (30, TraceRequest(0.0, 55, 6, "examples", 32, images=(TraceImage(9, "cat"),))),  # and the blocks, too
    (31, TraceRequest(0.0, 70, 4, images=(TraceImage(30), TraceImage(20)))),
]


@pytest.mark.parametrize("depth", [1, 2])
def test_plans_with_pictures(depth: int) -> None:
    """Layers of pictures in each step, what is dropped, and hits of both caches."""
    limits = {"num_blocks_override": 60, "max_num_seqs": 4, "max_num_batched_tokens": 32, "queue_depth": depth}
    options = {
        **limits,
        "block_size": 16,
        "kv_cache_dtype": "float32",
        "num_threads": 1,
        "preemption_mode": "recompute",
    }
    config = resolve(EngineOptions(model="bundled-sights", load_format="dummy", **options))
    settings = EngineSettings(max_model_len=config.model.max_model_len, **limits)
    expected, found = engine_plans(config, IMAGES), simulated_plans(config, settings, IMAGES)
    for number, (engine, simulated) in enumerate(zip(expected, found, strict=False)):
        assert simulated == engine, f"plan {number} differs"
    assert len(found) == len(expected)
    begun = [part for plan in found if plan.images is not None for part in plan.images[1] if not part[3]]
    assert len(begun) == 4


def bytes_of_a_block(config: EngineConfig) -> int:
    groups, layers_per_group = group_layers(layer_specs(config.model), 16)
    return block_bytes(groups, layers_per_group)
