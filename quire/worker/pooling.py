"""Pooled samples of a step: the last hidden state of a sequence's last token instead of a new token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.step import StepPlan, StepResult
from quire.worker.input_batch import InputBatch


def generated_samples(plan: StepPlan) -> list[int]:
    """Indices of the plan's samples that are tokens."""
    pooled = set(plan.pooled)
    return [index for index in range(len(plan.sample_seq_ids)) if index not in pooled]


def pooled_rows(plan: StepPlan, batch: InputBatch) -> np.ndarray:
    """[P] int64: the places of the pooled samples among the batch's rows that are read."""
    sources = np.array([plan.sample_from[index] for index in plan.pooled], np.int64)
    return batch.read_start[1:][sources] - 1


def add_pooled(result: StepResult, plan: StepPlan, vectors: np.ndarray, nonfinite: Sequence[int]) -> list[int]:
    """Add the vectors, [P, hidden size], to a result that has the tokens of the other samples only. nonfinite: indices
    of tokens with non-finite logits. Returns the indices of all samples that are not finite."""
    generated = generated_samples(plan)
    token_ids: list[list[int]] = [[] for _ in plan.sample_seq_ids]
    for index, tokens in zip(generated, result.token_ids, strict=True):
        token_ids[index] = tokens
    result.token_ids = token_ids
    result.logprobs = {generated[number]: entries for number, entries in result.logprobs.items()}
    result.candidates = {generated[number]: found for number, found in result.candidates.items()}
    is_sound = np.isfinite(vectors).all(axis=1).tolist()
    columns = list(zip(plan.pooled, vectors.tolist(), is_sound, strict=True))
    result.pooled = {index: vector for index, vector, sound in columns if sound}
    return [generated[number] for number in nonfinite] + [index for index, _, sound in columns if not sound]
