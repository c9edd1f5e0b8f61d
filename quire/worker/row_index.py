"""The slots of the request state: which row belongs to which live sequence."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np


class RowIndex:
    """At most `num_rows` sequences. The lowest free row is taken first, so that tables stay compact as requests come
    and go."""

    def __init__(self, num_rows: int) -> None:
        self._row_of: dict[int, int] = {}
        self._free = list(range(num_rows))

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._row_of

    def take(self, seq_id: int) -> int:
        """Give a new sequence a row; return it."""
        assert seq_id not in self._row_of, f"sequence {seq_id} has a row already"
        assert self._free, f"no free row for sequence {seq_id}: {len(self._row_of)} sequences are live"
        row = heapq.heappop(self._free)
        self._row_of[seq_id] = row
        return row

    def release(self, seq_id: int) -> int:
        """Free the row of a sequence; return it."""
        row = self._row_of.pop(seq_id)
        heapq.heappush(self._free, row)
        return row

    def row_of(self, seq_id: int) -> int:
        return self._row_of[seq_id]

    def rows_of(self, seq_ids: Sequence[int]) -> np.ndarray:
        """[len(seq_ids)] int64."""
        return np.fromiter(map(self._row_of.__getitem__, seq_ids), np.int64, len(seq_ids))
