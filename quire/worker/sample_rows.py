"""The sampled rows of a step: columns beside its input batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire.worker.input_batch import InputBatch

if TYPE_CHECKING:
    from quire.worker.request_state import RequestState


class SampleRows(NamedTuple):
    """R sampled rows, in result order. All columns are [R] int64.

    rows: request slots. lengths: tokens of the sequence so far (= position of the token being chosen). last_index: the
    place among the batch's rows that are read. num_prompt_tokens: of the row. are_read_rows: whether they are the rows
    that are read, in their order, so that none need be picked from those: most steps are such decodes.
    """

    rows: np.ndarray
    lengths: np.ndarray
    last_index: np.ndarray
    num_prompt_tokens: np.ndarray
    are_read_rows: bool

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
    are_read_rows = len(ends) == batch.num_read and list(sample_from) == list(range(len(ends)))
    if are_read_rows:
        return SampleRows(rows, batch.ends, batch.read_start[:-1], num_prompt_tokens, are_read_rows)
    source = np.array(sample_from, np.int64)
    last_index = batch.read_start[source + 1] - 1
    return SampleRows(rows, batch.ends[source], last_index, num_prompt_tokens, are_read_rows)
