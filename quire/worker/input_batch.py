"""The input batch of one step: columns of the host, without a Python loop over sequences or tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from quire.worker.request_state import RequestState


class InputBatch(NamedTuple):
    """S scheduled sequences with T tokens in all, in the plan's order.

    rows, starts, counts, ends: [S] int64: request slot, first position computed in this step, number of positions, and
    the position after the last. query_start: [S + 1] int64: sequence s owns tokens query_start[s]:query_start[s + 1].
    logits_rows: [R] int64, ascending, the tokens whose hidden states are read (None: all T): each sequence's last, and
    all of one whose prompt is scored. read_start: [S + 1] int64: of the R, those of sequence s begin at read_start[s].
    """

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    ends: np.ndarray
    query_start: np.ndarray
    logits_rows: np.ndarray | None
    read_start: np.ndarray

    @property
    def num_tokens(self) -> int:
        return int(self.query_start[-1])

    @property
    def max_query_len(self) -> int:
        """Most tokens of one sequence in this step; of a batch that is nothing but padding: 1, like a decode's, for
        grids follow it and graphs are captured over such batches."""
        return int(self.counts.max(initial=1))

    @property
    def max_seq_len(self) -> int:
        """Tokens of the longest sequence after this step."""
        return int(self.ends.max(initial=0))


def build_input_batch(
    seq_ids: Sequence[int], start_positions: Sequence[int], num_tokens: Sequence[int], requests: RequestState
) -> InputBatch:
    """Every scheduled token must be known, or sampled by an earlier step."""
    rows = requests.rows_of(seq_ids)
    starts = np.array(start_positions, np.int64)
    counts = np.array(num_tokens, np.int64)
    ends = starts + counts
    assert (ends <= requests.lengths[rows]).all(), "the plan schedules a token that no step has sampled"
    query_start = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=query_start[1:])
    scored = requests.columns.sampling.rows_with_prompt_logprobs
    return InputBatch(rows, starts, counts, ends, query_start, *_rows_to_read(rows, counts, query_start, scored))


def _rows_to_read(
    rows: np.ndarray, counts: np.ndarray, query_start: np.ndarray, scored: Collection[int]
) -> tuple[np.ndarray | None, np.ndarray]:
    """`logits_rows` and `read_start` of the batch. scored: rows whose prompts are scored."""
    num_tokens = query_start[-1]
    if num_tokens == len(rows):
        return None, query_start
    num_read = np.where(np.isin(rows, list(scored)), counts, 1) if scored else np.ones_like(counts)
    read_start = np.zeros_like(query_start)
    np.cumsum(num_read, out=read_start[1:])
    if read_start[-1] == num_tokens:
        return None, query_start
    return np.arange(read_start[-1]) + np.repeat(query_start[1:] - read_start[1:], num_read), read_start


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
