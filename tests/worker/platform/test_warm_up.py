"""The plans that compile kernels at a start: they run, whatever the limits, and leave no trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from quire.attention.device_batch import DeviceBatch
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.executors.local import LocalExecutor
from quire.kernels.triton.runtime import recorded_launches
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import AttentionSpec
from quire.layers.batch import ForwardBatch
from quire.sampling_params import SamplingParams
from quire.step import SequenceFork, StepPlan
from quire.worker.cuda_graphs import DeviceBackends
from quire.worker.warm_up import PROMPT_TOKENS, warm_up_attention, warm_up_plans
from tests.fakes.compilations import CompilationRecorder
from tests.fakes.host_math import HostAttention
from tests.worker.driver import Driver, sampling_of
from tests.worker.platform.conftest import DEVICE, MakeDriver
from tests.worker.platform.passes import NO_STATES

GROUPS = group_layers([AttentionSpec(1, 16, 16, 4)], 16)


def run(executor: LocalExecutor, plans: Sequence[StepPlan]) -> None:
    runner = executor._worker._runner
    with torch.inference_mode():
        for launched in [runner.launch(plan) for plan in plans]:
            launched.collect()


@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
def test_a_driver_finds_everything_as_it_was(
    make_driver: MakeDriver, executors: list[LocalExecutor], max_num_seqs: int
) -> None:
    warm, cold = (make_driver(max_num_seqs=max_num_seqs, num_blocks=9) for _ in range(2))
    worker = executors[0]._worker
    plans = warm_up_plans(worker._layout, max_num_seqs, 128, 2048)
    assert len(plans) == (3 if max_num_seqs == 1 else 4)
    assert {len(plan.forks) for plan in plans} == ({0, 1} if max_num_seqs == 8 else {0})
    run(executors[0], plans)
    for driver in (warm, cold):
        driver.add(0, [5, 9, 2])
        driver.decode(3)
    assert warm.sequences[0].output == cold.sequences[0].output


class Lengths(HostAttention):
    """Takes batches of padding, notes their sizes and computes nothing."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int, int]] = []

    def lengths_to_compile(self, longest: int) -> tuple[tuple[int, int], ...]:
        return (1, 100), (9, longest), (300, longest)

    def plan(self, batch: DeviceBatch) -> None:  # type: ignore[override]
        assert batch.seq_lens.tolist() == [0, 0]
        assert batch.query_start.tolist() == [0, 0, 0]
        assert set(batch.slot_mapping[0].tolist()) == {-1}
        self.seen.append((batch.num_seqs, batch.num_tokens, batch.max_query_len, batch.max_seq_len))


class NoModel:
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        assert len(batch.token_ids) == len(batch.slot_positions)
        return batch.slot_positions


def test_attention_is_compiled_for_every_length_that_a_step_can_have(
    make_driver: MakeDriver, executors: list[LocalExecutor]
) -> None:
    make_driver()
    lengths = Lengths()
    inputs = executors[0]._worker._runner._compute.inputs
    warm_up_attention(NoModel(), DeviceBackends(lengths, NO_STATES), inputs, 128, 512)  # type: ignore[arg-type]
    assert lengths.seen == [(2, 3, 1, 100), (2, 19, 9, 128)]


@pytest.mark.parametrize(("longest", "budget", "tokens"), [(128, 2048, PROMPT_TOKENS), (20, 2048, 18), (128, 16, 8)])
def test_plans_keep_to_the_limits(longest: int, budget: int, tokens: int) -> None:
    for plan in warm_up_plans(KVCacheLayout(16, 2, *GROUPS), 4, longest, budget):
        assert plan.total_tokens <= budget
        assert all(s + n <= longest for s, n in zip(plan.start_positions, plan.num_tokens, strict=True))
        assert all(len(new.token_ids) == tokens for new in plan.new_sequences)
        assert plan.block_copies == [], "there is but one block"


KINDS = [
    SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0, repetition_penalty=1.2, logit_bias={4: 1.0}, min_tokens=2),
    SamplingParams(temperature=0, frequency_penalty=0.5, allowed_token_ids=[3, 4, 5, 6], logprobs=0),
]


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_nothing_is_compiled_while_serving(
    model_path: Path, executors: list[LocalExecutor], batch_invariant: bool
) -> None:
    """Every kind of plan and of sampling finds its kernels compiled for its types, alignments and constants."""
    options = {"model": str(model_path), "max_num_seqs": 5, "max_num_batched_tokens": 32, "block_size": 4, **DEVICE}
    executor = LocalExecutor(
        resolve(EngineOptions.from_keywords({**options, "batch_invariant": batch_invariant, "max_model_len": 256}))
    )
    executors.append(executor)
    executor._worker.platform.compiles = True  # type: ignore[union-attr]
    groups, layers_per_group = group_layers(executor.load_model(), 4)
    starting, serving = CompilationRecorder(), CompilationRecorder()
    with recorded_launches(starting):
        executor.allocate(KVCacheLayout(4, 60, groups, layers_per_group))
    driver = Driver(executor.execute, block_size=4, num_blocks=60)
    with recorded_launches(serving):  # the kernels do not run, so results are not read
        for seq_id, params in enumerate(KINDS[:4]):
            driver.add(seq_id, [5, 9, 2, 8, 1, 7, 3][: 3 + seq_id], sampling_of(params, seed=seq_id))
        driver.submit({0: 2})
        driver.submit({0: 1, 1: 4, 2: 5, 3: 6}, [SequenceFork(0, 4, sampling_of(KINDS[4]))])
        driver.submit(dict.fromkeys(range(5), 1))
        for seq_id in range(4):  # every kind by itself, at other places of the buffers
            driver.submit({seq_id: 1, 4: 1})
            driver.submit({seq_id: 1})
    assert not executor._worker._last.has_failed  # type: ignore[union-attr]
    assert serving.needed
    assert serving.needed <= starting.needed


def test_a_context_too_short_for_anything_is_not_warmed_up() -> None:
    assert warm_up_plans(KVCacheLayout(16, 9, *GROUPS), 4, 2, 16) == []
