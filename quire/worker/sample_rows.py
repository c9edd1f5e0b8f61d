"""The sampled rows of a step: columns beside its input batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire.worker.input_batch import InputBatch

if TYPE_CHECKING:
    from quire.worker.request_state import RequestState


class SampleRows(NamedTuple):
    """R sampled rows, in result order, of the sequences `seq_ids`, which read the logits of `sources`, indices into the
    batch. All columns are [R] int64.

    rows: request slots. lengths: tokens of the sequence so far (= position of the token being chosen). last_index: the
    place among the batch's rows that are read. num_prompt_tokens: of the row. are_read_rows: whether they are the rows
    that are read, in their order, so that none need be picked from those: most steps are such decodes.

    With drafts a sample has several rows: one for its last known token, and one for each draft. firsts: [samples + 1]
    int64, where each one's rows begin among the R (None: each has one).
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


def build_sample_rows(
    seq_ids: Sequence[int], sample_from: Sequence[int], batch: InputBatch, requests: RequestState
) -> SampleRows:
    """sample_from: [R], indices into the batch. From here on the rows count their new tokens."""
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
    """The rows of samples of which some have drafts: each is chosen for as if the drafts before it were accepted."""
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
