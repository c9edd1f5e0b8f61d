"""Per-row lists of (token, value), kept flat so that a step applies all of them with one indexed write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from quire.sampling.shared_lists import SharedLists

Tokens = Sequence[int] | Mapping[int, float]


class RaggedColumn:
    """Some rows own a list of token ids (with a value each); most own none. Lists of one request are converted once.

    The flat arrays are rebuilt when rows have changed, not every step. A step asks for its entries by `select`. They
    have an entry for each token of each row: for lists that a request's limits keep short.
    """

    def __init__(self) -> None:
        self._lists: SharedLists[Tokens, tuple[np.ndarray, np.ndarray]] = SharedLists(_arrays)
        self._flat: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def set(self, row: int, tokens: Tokens) -> None:
        """Give `row` these tokens (a mapping: and their values; else 0), in place of what it had. An empty one clears
        it."""
        if not tokens:
            self.clear(row)
            return
        self._lists.set(row, tokens)
        self._flat = None

    def clear(self, row: int) -> None:
        if self._lists.clear(row):
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
        entries = list(self._lists)
        if not entries:
            return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32)
        return (
            np.repeat([row for row, _ in entries], [len(tokens) for _, (tokens, _) in entries]),
            np.concatenate([tokens for _, (tokens, _) in entries]),
            np.concatenate([values for _, (_, values) in entries]),
        )


class TokenLists:
    """As RaggedColumn, for lists that may name the whole vocabulary: never flat, one array for a request."""

    def __init__(self) -> None:
        self._lists: SharedLists[Sequence[int], np.ndarray] = SharedLists(lambda tokens: np.asarray(tokens, np.int64))

    def set(self, row: int, tokens: Sequence[int]) -> None:
        """Give `row` these tokens, in place of what it had. An empty list clears it."""
        if tokens:
            self._lists.set(row, tokens)
        else:
            self.clear(row)

    def clear(self, row: int) -> None:
        self._lists.clear(row)

    def select(self, index_of_row: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """(batch index, token ids [N] int64) of each row in a batch that has a list. index_of_row: as RaggedColumn."""
        return [(index, tokens) for row, tokens in self._lists if (index := int(index_of_row[row])) >= 0]

    @property
    def num_bytes(self) -> int:
        """What the arrays hold."""
        return sum(tokens.nbytes for tokens in self._lists.distinct())


def _arrays(tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
    ids = np.fromiter(tokens, np.int64, len(tokens))
    if isinstance(tokens, Mapping):
        return ids, np.fromiter(tokens.values(), np.float32, len(tokens))
    return ids, np.zeros(len(tokens), np.float32)
