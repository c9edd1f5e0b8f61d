"""The sampled rows of a step: columns beside its input batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire.worker.input_batch import InputBatch

if TYPE_CHECKING:
    from quire.worker.request_state import RequestState


class SampleRows(NamedTuple):
    """R sampled rows, in result order. All [R] int64.

    rows: request slots. lengths: tokens of the sequence so far (= position of the token being chosen). last_index: the
    place among the batch's rows that are read. num_prompt_tokens: of the row.
    """

    rows: np.ndarray
    lengths: np.ndarray
    last_index: np.ndarray
    num_prompt_tokens: np.ndarray


def build_sample_rows(
    seq_ids: Sequence[int], sample_from: Sequence[int], batch: InputBatch, requests: RequestState
) -> SampleRows:
    """sample_from: [R], indices into the batch. From here on the rows count their new tokens."""
    source = np.array(sample_from, np.int64)
    rows, lengths = requests.rows_of(seq_ids), batch.ends[source]
    requests.lengths[rows] = lengths + 1
    return SampleRows(rows, lengths, batch.read_start[1:][source] - 1, requests.num_prompt_tokens[rows])
