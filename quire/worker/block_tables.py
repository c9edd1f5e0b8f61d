"""The block table of every row, one table per KV group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.kv_cache.layout import NULL_BLOCK


class BlockTables:
    """Per KV group [num_rows, max_blocks of the group] int32: physical blocks in logical order, then NULL_BLOCK."""

    def __init__(self, block_sizes: Sequence[int], num_rows: int, max_model_len: int) -> None:
        """block_sizes: tokens of a block, per KV group."""
        self.block_sizes = tuple(block_sizes)
        self.num_rows = num_rows
        assert NULL_BLOCK == 0, "zeros are reserved and not touched, other values would be"
        widths = [-(-(max_model_len + 1) // size) for size in self.block_sizes]
        self._tables = tuple(np.zeros((num_rows, width), np.int32) for width in widths)
        self._num_blocks = np.zeros((len(self._tables), num_rows), np.int64)

    @property
    def num_groups(self) -> int:
        return len(self._tables)

    def num_blocks(self, row: int) -> list[int]:
        """Entries of the tables of `row`, per group."""
        counts: list[int] = self._num_blocks[:, row].tolist()
        return counts

    def append(self, row: int, block_ids: Sequence[Sequence[int]]) -> list[int]:
        """Append blocks to the tables of `row`. block_ids: per group. Returns how many there were, per group."""
        counts = self.num_blocks(row)
        for group, (table, start, new) in enumerate(zip(self._tables, counts, block_ids, strict=True)):
            table[row, start : start + len(new)] = new
            self._num_blocks[group, row] = start + len(new)
        return counts

    def replace(self, row: int, group: int, logical_index: int, block_id: int) -> None:
        """Point one entry at another block."""
        assert logical_index < self._num_blocks[group, row], "only an entry that exists can be replaced"
        self._tables[group][row, logical_index] = block_id

    def copy(self, source: int, destination: int) -> None:
        """Make the tables of row `destination` equal to those of row `source`."""
        for table in self._tables:
            table[destination] = table[source]
        self._num_blocks[:, destination] = self._num_blocks[:, source]

    def clear(self, row: int) -> None:
        """Remove all blocks of `row`."""
        for group, table in enumerate(self._tables):
            table[row, : self._num_blocks[group, row]] = NULL_BLOCK
        self._num_blocks[:, row] = 0

    def gather(self, rows: np.ndarray, num_tokens: int) -> tuple[np.ndarray, ...]:
        """Tables of `rows` ([S] int64), wide enough for `num_tokens` tokens: per group [S, width] int32."""
        return tuple(
            table[rows, : -(-num_tokens // size)] for table, size in zip(self._tables, self.block_sizes, strict=True)
        )

    def written(self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> list[int]:
        """The blocks, of all groups, in which positions starts .. ends - 1 of `rows` lie (all [S] int64)."""
        entries = []
        for table, size in zip(self._tables, self.block_sizes, strict=True):
            first = starts // size
            counts = (ends - 1) // size - first + 1
            logical = np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)
            entries.append(table[np.repeat(rows, counts), logical])
        blocks: list[int] = np.unique(np.concatenate(entries)).tolist()
        return blocks
