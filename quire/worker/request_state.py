"""The worker's state of all live sequences. A sequence keeps one row of every table, its slot, as long as it lives.

The input batch of a step is gathered from these rows; a plan brings only differences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.sampling.parameters import SamplingRows
from quire.step import SequenceSampling
from quire.worker.row_index import RowIndex


class RequestState:
    """At most `num_rows` sequences of at most `max_model_len` tokens.

    token_ids: [num_rows, max_model_len + 1] int32 (one more, because a sequence that has just reached its end may be
    run once more before the scheduler knows). lengths: [num_rows] int64, how many of them are known, the prompt
    included. num_prompt_tokens: [num_rows] int64. sampling: the sampler's columns of the same rows.

    The token table is reserved and not touched, so a row takes physical memory only as far as it was ever filled.
    """

    def __init__(self, num_rows: int, max_model_len: int) -> None:
        self.token_ids = np.zeros((num_rows, max_model_len + 1), np.int32)
        self.lengths = np.zeros(num_rows, np.int64)
        self.num_prompt_tokens = np.zeros(num_rows, np.int64)
        self.sampling = SamplingRows(num_rows)
        self._index = RowIndex(num_rows)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._index

    def add_request(
        self, seq_id: int, token_ids: Sequence[int] | np.ndarray, num_prompt_tokens: int, sampling: SequenceSampling
    ) -> int:
        """Give a new sequence a row that holds `token_ids`; return the row."""
        row = self._index.take(seq_id)
        self.token_ids[row, : len(token_ids)] = token_ids
        self.lengths[row] = len(token_ids)
        self.num_prompt_tokens[row] = num_prompt_tokens
        self.sampling.set(row, sampling)
        return row

    def release(self, seq_id: int) -> int:
        """Free the row of a sequence; return the row."""
        row = self._index.release(seq_id)
        self.sampling.clear(row)
        return row

    def row_of(self, seq_id: int) -> int:
        return self._index.row_of(seq_id)

    def rows_of(self, seq_ids: Sequence[int]) -> np.ndarray:
        """[len(seq_ids)] int64."""
        return self._index.rows_of(seq_ids)

    def replace_last(self, row: int, token_id: int) -> None:
        """Overwrite the last known token of `row`."""
        self.token_ids[row, self.lengths[row] - 1] = token_id
