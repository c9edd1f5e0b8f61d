"""Per-row lists of (token, value), kept flat so that a step applies all of them with one indexed write."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class RaggedColumn:
    """Some rows own a list of token ids (with a value each); most own none.

    The flat arrays are rebuilt when rows have changed, not every step. A step asks for its entries by `select`.
    """

    def __init__(self) -> None:
        self._lists: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._flat: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def set(self, row: int, token_ids: Sequence[int], values: Sequence[float] | None = None) -> None:
        """Give `row` these tokens (and values, default 0), in place of what it had. An empty list clears it."""
        if not len(token_ids):
            self.clear(row)
            return
        tokens = np.asarray(token_ids, np.int64)
        self._lists[row] = (
            tokens,
            np.zeros(len(tokens), np.float32) if values is None else np.asarray(values, np.float32),
        )
        self._flat = None

    def clear(self, row: int) -> None:
        if self._lists.pop(row, None) is not None:
            self._flat = None

    def select(self, index_of_row: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Entries of the rows in a batch as (batch index, token id, value), each [N].

        index_of_row: [num_rows] int64, the batch index of each row, -1 where the row is not in the batch.
        """
        if self._flat is None:
            self._flat = self._flatten()
        rows, tokens, values = self._flat
        index = index_of_row[rows]
        present = index >= 0
        return index[present], tokens[present], values[present]

    def _flatten(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if not self._lists:
            return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32)
        sizes = [len(tokens) for tokens, _ in self._lists.values()]
        return (
            np.repeat(np.fromiter(self._lists, np.int64, len(self._lists)), sizes),
            np.concatenate([tokens for tokens, _ in self._lists.values()]),
            np.concatenate([values for _, values in self._lists.values()]),
        )
