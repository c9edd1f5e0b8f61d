"""Step-column values that requests list per token, such as positions of image patches, on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quire.step import TokenValues
from quire.worker.input_batch import InputBatch


class ListedValues:
    """Step-column values given per token instead of by a rule (image positions), by row: [C, tokens] int64 up to the
    last listed token, in all C columns."""

    def __init__(self, num_rows: int) -> None:
        self._of_rows: dict[int, np.ndarray] = {}
        self._counts = np.zeros(num_rows, np.int64)
        """Tokens of each row up to the last listed one."""

    def set(
        self,
        row: int,
        lists: Sequence[TokenValues | None],
        ruled: Callable[[np.ndarray], np.ndarray],
        values: np.ndarray,
    ) -> None:
        """Set a row's lists. lists: per column (None: none). ruled: maps row values of the first tokens, [tokens, C],
        to token values, [C, tokens]. values: row's values, [C], which apply after the lists."""
        count = max((own.end for own in lists if own is not None), default=0)
        self._put(row, None)
        if count:
            of_row = np.tile(values, (count, 1))
            named = [(column, own) for column, own in enumerate(lists) if own is not None]
            for column, own in named:
                of_row[: own.end, column] = 0
            listed = ruled(of_row)
            for column, own in named:
                listed[column, own.start : own.end] = own.values
            self._put(row, listed)

    def copy(self, source: int, destination: int) -> None:
        self._put(destination, self._of_rows.get(source))

    def of_batch(self, batch: InputBatch) -> tuple[np.ndarray, np.ndarray] | None:
        """Tokens of a batch with listed values, [L] int64, and the values, [C, L] int64; None if none."""
        if not self._of_rows:
            return None
        found = np.flatnonzero(batch.starts < self._counts[batch.rows])
        if not len(found):
            return None
        starts, ends, first = batch.starts, batch.ends, batch.query_start
        parts = [self._of_rows[int(batch.rows[s])][:, starts[s] : ends[s]] for s in found]
        tokens = [np.arange(first[s], first[s] + part.shape[1]) for s, part in zip(found, parts, strict=True)]
        return np.concatenate(tokens), np.concatenate(parts, axis=1)

    def _put(self, row: int, listed: np.ndarray | None) -> None:
        self._of_rows.pop(row, None)
        self._counts[row] = 0 if listed is None else listed.shape[1]
        if listed is not None:
            self._of_rows[row] = listed
