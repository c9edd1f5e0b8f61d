"""The plans that the CPU's worker is tested with, on the device worker: the tokens are those of Transformers."""

from __future__ import annotations

from tests.worker.platform.conftest import MakeDriver
from tests.worker.test_execute import (
    PROMPTS,
    expected,
    test_a_child_knows_every_token_of_its_prompt,
    test_a_child_with_a_history_catches_up,
    test_a_chunk_that_samples_nothing,
    test_a_copied_block_leaves_its_source_alone,
    test_a_plan_that_only_releases,
    test_a_prefix_hit_starts_after_the_shared_blocks,
    test_a_token_that_was_not_sampled_is_a_bug_that_shows,
)
from tests.worker.test_overlap import (
    test_a_sequence_that_is_run_once_too_often,
    test_preempted_while_its_last_plan_runs,
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
    "test_a_token_that_was_not_sampled_is_a_bug_that_shows",
    "test_preempted_while_its_last_plan_runs",
    "test_the_last_position_of_the_context_can_be_overrun",
]


def test_planned_ahead_while_results_come_late(make_driver: MakeDriver, expected: list[list[int]]) -> None:
    """One plan is always in flight while the next is submitted; what a step leaves for the host is read only then."""
    driver = make_driver(block_size=4)
    for seq_id, prompt in enumerate(PROMPTS):
        driver.add(seq_id, prompt)
    for step in range(6):
        driver.submit({s: sequence.length - sequence.computed for s, sequence in driver.sequences.items()})
        if step > 0:
            driver.apply()
    driver.apply()
    assert [driver.sequences[i].output for i in range(4)] == [tokens[:6] for tokens in expected]
