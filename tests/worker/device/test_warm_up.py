"""The plans that compile kernels at a start: they run, whatever the limits, and leave no trace."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from quire.attention.device_batch import DeviceBatch
from quire.executors.device import DeviceExecutor
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import FullAttentionSpec
from quire.step import StepPlan
from quire.worker.device.warm_up import PROMPT_TOKENS, warm_up_attention, warm_up_plans
from tests.fakes.host_math import HostAttention
from tests.worker.device.conftest import MakeDriver

GROUPS = group_layers([FullAttentionSpec(1, 16, 4)])


def run(executor: DeviceExecutor, plans: Sequence[StepPlan]) -> None:
    runner = executor._worker._runner
    with torch.inference_mode():
        for collect in [runner.launch(plan) for plan in plans]:
            collect()


@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
def test_a_driver_finds_everything_as_it_was(
    make_driver: MakeDriver, executors: list[DeviceExecutor], max_num_seqs: int
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

    def query_lengths_to_compile(self) -> tuple[int, ...]:
        return 1, 9, 300

    def plan(self, batch: DeviceBatch) -> None:  # type: ignore[override]
        assert batch.seq_lens.tolist() == [0, 0]
        assert batch.query_start.tolist() == [0, 0, 0]
        assert set(batch.slot_mapping[0].tolist()) == {-1}
        self.seen.append((batch.num_seqs, batch.num_tokens, batch.max_query_len, batch.max_seq_len))


class NoModel:
    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, step: None) -> torch.Tensor:
        assert len(token_ids) == len(positions)
        return positions


def test_attention_is_compiled_for_every_length_that_a_step_can_have(
    make_driver: MakeDriver, executors: list[DeviceExecutor]
) -> None:
    make_driver()
    lengths = Lengths()
    inputs = executors[0]._worker._runner._state.inputs
    warm_up_attention(NoModel(), lengths, inputs, 128, 512)  # type: ignore[arg-type]
    assert lengths.seen == [(2, 3, 1, 128), (2, 19, 9, 128)]


@pytest.mark.parametrize(("longest", "budget", "tokens"), [(128, 2048, PROMPT_TOKENS), (20, 2048, 18), (128, 16, 8)])
def test_plans_keep_to_the_limits(longest: int, budget: int, tokens: int) -> None:
    for plan in warm_up_plans(KVCacheLayout(16, 2, *GROUPS), 4, longest, budget):
        assert plan.total_tokens <= budget
        assert all(s + n <= longest for s, n in zip(plan.start_positions, plan.num_tokens, strict=True))
        assert all(len(new.token_ids) == tokens for new in plan.new_sequences)
        assert plan.block_copies == [], "there is but one block"


def test_a_context_too_short_for_anything_is_not_warmed_up() -> None:
    assert warm_up_plans(KVCacheLayout(16, 9, *GROUPS), 4, 2, 16) == []
