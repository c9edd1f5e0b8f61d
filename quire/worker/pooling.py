"""Pooled samples of a step: vectors from a sequence's last hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from quire.config.pooling import Method
from quire.models.interface import CausalLM
from quire.step import StepPlan, StepResult
from quire.worker.input_batch import InputBatch


class PooledRows(NamedTuple):
    """P pooled samples, in result order: sample p is the mean of read rows `starts[p]` to `ends[p]` - 1. starts, ends,
    rows (request slots): [P] int64. are_single: each has one row."""

    starts: np.ndarray
    ends: np.ndarray
    are_single: bool
    rows: np.ndarray


def generated_samples(plan: StepPlan) -> list[int]:
    """Indices of the plan's samples that are tokens, not pooled vectors."""
    pooled = set(plan.pooled)
    return [index for index in range(len(plan.sample_seq_ids)) if index not in pooled]


def pooling_batch(batch: InputBatch, method: Method) -> InputBatch:
    """Batch of a pooling engine with the rows that `method` reads. Prompts are whole, unless the last token is
    pooled."""
    if method == "mean":
        return batch._replace(logits_rows=None, read_start=batch.query_start)
    if method == "cls":
        return batch._replace(logits_rows=batch.query_start[:-1], read_start=np.arange(len(batch.rows) + 1))
    return batch


def pooled_rows(plan: StepPlan, batch: InputBatch, method: Method) -> PooledRows:
    """Indices of the pooled samples' rows among the read hidden states."""
    sources = np.array([plan.sample_from[index] for index in plan.pooled], np.int64)
    starts, ends = batch.read_start[sources], batch.read_start[sources + 1]
    if method == "mean":
        return PooledRows(starts, ends, False, batch.rows[sources])
    return PooledRows(ends - 1, ends, True, batch.rows[sources])


def pool_rows(
    hidden: torch.Tensor, rows: PooledRows, model: CausalLM, slots: torch.Tensor | None, *, has_head: bool
) -> np.ndarray:
    """Pooled samples, [P, width] float32, from the rows read, [R, hidden size]. has_head: apply the model's projection,
    with adapters in slots, [P]. Rows are added in order, so no bit depends on other samples."""
    if rows.are_single:
        vectors = hidden[torch.from_numpy(rows.starts)]
    else:
        wide, spans = hidden.float().numpy(), zip(rows.starts.tolist(), rows.ends.tolist(), strict=True)
        means = np.stack([wide[start:end].sum(axis=0) / np.float32(end - start) for start, end in spans])
        vectors = torch.from_numpy(means).to(hidden.dtype)
    if has_head:
        vectors = model.compute_logits(vectors, slots)
    return vectors.float().numpy()


def add_pooled(result: StepResult, plan: StepPlan, vectors: np.ndarray, nonfinite: Sequence[int]) -> list[int]:
    """Add vectors, [P, width], to a result with the other samples' tokens. nonfinite: indices of token samples with
    non-finite logits. Returns indices of all non-finite samples."""
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
