"""The plans that the CPU's worker is tested with, on the device worker: the tokens are those of Transformers."""

from __future__ import annotations

from tests.worker.test_execute import (
    expected,
    test_a_child_knows_every_token_of_its_prompt,
    test_a_child_with_a_history_catches_up,
    test_a_chunk_that_samples_nothing,
    test_a_copied_block_leaves_its_source_alone,
    test_a_plan_that_only_releases,
    test_a_prefix_hit_starts_after_the_shared_blocks,
    test_a_token_that_nobody_sampled_is_a_bug_that_shows,
    test_forks_share_blocks_until_they_write,
    test_preempted_and_resumed_with_other_blocks,
    test_prompts_of_different_length_in_one_batch,
)
from tests.worker.test_overlap import (
    test_a_sequence_that_is_run_once_too_often,
    test_preempted_while_its_last_plan_runs,
    test_same_tokens_as_step_by_step,
    test_the_last_position_of_the_context_can_be_overrun,
)

__all__ = [
    "expected",
    "test_a_child_knows_every_token_of_its_prompt",
    "test_a_child_with_a_history_catches_up",
    "test_a_chunk_that_samples_nothing",
    "test_a_copied_block_leaves_its_source_alone",
    "test_a_plan_that_only_releases",
    "test_a_prefix_hit_starts_after_the_shared_blocks",
    "test_a_sequence_that_is_run_once_too_often",
    "test_a_token_that_nobody_sampled_is_a_bug_that_shows",
    "test_forks_share_blocks_until_they_write",
    "test_preempted_and_resumed_with_other_blocks",
    "test_preempted_while_its_last_plan_runs",
    "test_prompts_of_different_length_in_one_batch",
    "test_same_tokens_as_step_by_step",
    "test_the_last_position_of_the_context_can_be_overrun",
]
