"""Sampled rows of a step: columns beside its input batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire.worker.input_batch import InputBatch

if TYPE_CHECKING:
    from quire.worker.request_state import RequestState


class SampleRows(NamedTuple):
    """R sampled rows, in result order, for the sequences `seq_ids`; `sources` are indices into the batch whose logits
    they read. Columns are [R] int64.

    rows: request slots. lengths: tokens so far (= position of the sampled token). last_index: index among the batch's
    read rows. are_read_rows: True if they equal the read rows, in order. firsts: [samples + 1] int64, first row of each
    sample with drafts (None: one row each).
    """

    rows: np.ndarray
    lengths: np.ndarray
    last_index: np.ndarray
    num_prompt_tokens: np.ndarray
    are_read_rows: bool
    seq_ids: Sequence[int]
    sources: Sequence[int]
    firsts: np.ndarray | None = None

    @property
    def columns(self) -> tuple[np.ndarray, ...]:
        return self[:4]

    @property
    def starts(self) -> np.ndarray:
        """First row of each sample, and R: `firsts` without drafts too."""
        return np.arange(len(self.rows) + 1) if self.firsts is None else self.firsts


def build_sample_rows(
    seq_ids: Sequence[int], sample_from: Sequence[int], batch: InputBatch, requests: RequestState
) -> SampleRows:
    """Rows of logits that a plan's samples need. sample_from: [R], indices into the batch. The rows' lengths include
    the new tokens from here on."""
    ends, lengths = batch.ends.tolist(), requests.lengths
    for seq_id, index in zip(seq_ids, sample_from, strict=True):
        lengths[seq_id] = ends[index] + 1
    rows = requests.rows_of(seq_ids)
    num_prompt_tokens = requests.num_prompt_tokens[rows]
    if batch.num_drafts is not None:
        return _with_drafts(SampleRows(rows, rows, rows, num_prompt_tokens, False, seq_ids, sample_from), batch)
    are_read_rows = len(ends) == batch.num_read and list(sample_from) == list(range(len(ends)))
    if are_read_rows:
        return SampleRows(rows, batch.ends, batch.read_start[:-1], num_prompt_tokens, True, seq_ids, sample_from)
    source = np.array(sample_from, np.int64)
    last_index = batch.read_start[source + 1] - 1
    return SampleRows(rows, batch.ends[source], last_index, num_prompt_tokens, False, seq_ids, sample_from)


def _with_drafts(samples: SampleRows, batch: InputBatch) -> SampleRows:
    """Expand samples with drafts into rows, each as if the earlier drafts were accepted."""
    assert batch.num_drafts is not None, "a batch with drafts"
    sources = np.array(samples.sources, np.int64)
    num_drafts = batch.num_drafts[sources]
    counts = num_drafts + 1
    firsts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=firsts[1:])
    places = np.arange(firsts[-1]) - np.repeat(firsts[:-1], counts)
    lengths = np.repeat(batch.ends[sources] - num_drafts, counts) + places
    last_index = np.repeat(batch.read_start[sources + 1] - counts, counts) + places
    are_read_rows = len(last_index) == batch.num_read and bool((last_index == np.arange(len(last_index))).all())
    return samples._replace(
        rows=np.repeat(samples.rows, counts),
        lengths=lengths,
        last_index=last_index,
        num_prompt_tokens=np.repeat(samples.num_prompt_tokens, counts),
        are_read_rows=are_read_rows,
        firsts=firsts,
    )
