"""When drafts are looked up, and what is kept of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire.config.speculation import SpeculationConfig
from quire.errors import QuireError
from quire.sampling.results import SampledTokens
from quire.step import SamplingInputs, StepPlan, StepResult, TokenLogprobs
from quire.worker.drafts import PATIENCE, STRIDE, HostDrafts, add_accepted, note_found, num_to_skip
from quire.worker.finders import NO_FINDER, TextFinder
from quire.worker.input_batch import InputBatch
from quire.worker.masks import read_masks
from quire.worker.plain_texts import PlainCorpus, PlainTexts
from quire.worker.platform.cpu_step import CpuStep
from quire.worker.sample_rows import SampleRows


@pytest.mark.parametrize(
    ("chosen", "count"),
    [
        ([5, 6, 7, 8], 4),
        ([5, 6, 9, 8], 3),
        ([4, 6, 7, 8], 1),
        ([5, -1, 7, 8], 1),  # the next step comes upon the row without a finite score
        ([5, 6, -1, 8], 2),
        ([-1, 6, 7, 8], 1),
        ([4, -1, -1, -1], 1),  # behind a wrong draft nothing means anything
    ],
)
def test_what_is_accepted(chosen: list[int], count: int) -> None:
    drafts = HostDrafts(2, 3, NO_FINDER, has_states=False)
    drafts._placed = {1: [5, 6, 7]}
    assert drafts.accept([3, *chosen, 2], [0, 1, 2]) == [1, count, 1]


def test_text_that_does_not_repeat_itself_is_looked_at_less_often() -> None:
    """And in every step again, once something was found."""
    asked = []

    class Counting(TextFinder):
        def find_drafts(self, table: np.ndarray, rows: np.ndarray, lengths: np.ndarray, *rest: Any) -> int:
            asked.append(steps[0])
            assert lengths.tolist() == [51]
            return super().find_drafts(table, rows, lengths, *rest)

    drafts = HostDrafts(2, 3, Counting(2, SpeculationConfig(3, 1, 2), PlainTexts, PlainCorpus), has_states=False)
    table, rows = np.arange(200, dtype=np.int32).reshape(2, 100), np.array([1])
    columns = SimpleNamespace(drafts=drafts, token_ids=table)
    compute: Any = SimpleNamespace(columns=columns, tells_drafts=False)
    batch = InputBatch.of(rows, np.array([49]), np.array([1]))
    step, steps = CpuStep(compute, StepPlan(0, [1], [49], [1], [1], [0]), batch), [0]
    sampled = SampleRows(rows, np.array([50]), np.array([0]), np.array([5]), True, [1], [0])

    def found() -> list[int] | None:
        steps[0] += 1
        accepted = step.accept(torch.zeros(1, 1), samples, sampled, requests)
        return None if accepted.found is None else accepted.found.read(iter(()))

    samples: Any = object()
    requests: Any = None
    assert [found() for _ in range(PATIENCE + 2 * STRIDE)] == [None] * (PATIENCE + 2 * STRIDE)
    assert asked == [*range(1, PATIENCE + 1), PATIENCE + STRIDE, PATIENCE + 2 * STRIDE]
    table[1, 50] = table[1, 9]
    assert [found() for _ in range(STRIDE + 3)] == [None] * (STRIDE - 1) + [[3]] * 4


def test_tokens_and_logprobs_of_accepted_rows() -> None:
    """Rows that are not finite: the second sample's first, one that the third has accepted, and a rejected one."""
    entries = {row: TokenLogprobs([row], [-1.0], 1) for row in (0, 1, 2, 5, 6)}
    found = SampledTokens(list(range(8)), entries, {}, (3, 4, 7))
    result = StepResult(0, [])
    assert add_accepted(result, found, [0, 3, 5, 8], [2, 1, 3]) == [1]
    assert result.token_ids == [[0, 1], [3], [5, 6]]
    assert result.logprobs == {0: [entries[0], entries[1]], 2: [entries[5], entries[6]]}
    assert result.num_drafts == 5


def test_masks_of_rows_with_drafts() -> None:
    """Three samples of one, three and four rows. The second is free before its first draft and has one mask behind
    drafts: what lies behind allows nothing. The third has no constraint."""
    plan = StepPlan(7, [0, 1, 2], [0, 0, 0], [1, 3, 4], [0, 1, 2], [0, 1, 2], masked_samples=[0, 1])
    first, behind = (bytes([number] * 8) for number in (1, 2))
    firsts = np.array([0, 1, 4, 8])
    masks = read_masks(SamplingInputs(7, {0: first}, draft_masks={1: [behind]}), plan, 60, firsts)
    assert masks is not None
    assert masks.indices.tolist() == [0, 2, 3]
    assert [words.tobytes() for words in masks.words] == [first, behind, bytes(8)]
    free = read_masks(SamplingInputs(7, {0: first}, draft_masks={1: [b"", behind, behind]}), plan, 60, firsts)
    assert free is not None
    assert free.indices.tolist() == [0, 3], "a worker computes fewer drafts than the scheduler proposes"
    with pytest.raises(QuireError, match="not those that step 7 expects"):
        read_masks(SamplingInputs(7, {}, draft_masks={2: [behind]}), plan, 60, firsts)
    with pytest.raises(QuireError, match="has 8 bytes"):
        read_masks(SamplingInputs(7, {}, draft_masks={1: [b"abc"]}), plan, 60, firsts)


def test_what_was_found_for_the_next_step() -> None:
    """The second of three samples is a vector, and the third has a constraint."""
    plan = StepPlan(0, [0, 1, 2], [0] * 3, [1] * 3, [0, 1, 2], [0, 1, 2], pooled=[1], masked_samples=[2])
    result = StepResult(0, [])
    note_found(result, plan, [2, 1], [[4, 5], [6, 9]], tells_all=False)
    assert result.found_drafts == {0: 2, 2: 1}
    assert result.draft_token_ids == {2: [6]}
    note_found(result, plan, [2, 1], [[4, 5], [6, 9]], tells_all=True)
    assert result.draft_token_ids == {0: [4, 5], 2: [6]}


def test_look_ups_without_a_result_become_rare() -> None:
    found = [num_to_skip(number * PATIENCE) for number in range(7)]
    assert found == [0, 3, 7, 11, 15, 15, 15]
    assert num_to_skip(PATIENCE - 1) == 0
