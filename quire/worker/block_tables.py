from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quire.kv_cache.deal import ALL_TOKENS, Deal
from quire.kv_cache.layout import NULL_BLOCK, KVCacheLayout


class TableShape(NamedTuple):
    """Shape of a KV group's table. block_size: tokens per entry, those of other ranks included. kernel_blocks: entries
    per block. has_slots: True if each token has a slot; else an entry is a state. deal: share of the tokens that this
    rank keeps (None: all)."""

    block_size: int
    kernel_blocks: int = 1
    has_slots: bool = True
    deal: Deal = ALL_TOKENS

    def width(self, num_tokens: int) -> int:
        """Number of entries for `num_tokens` tokens, rounded up to whole blocks."""
        return -(-num_tokens // (self.block_size * self.kernel_blocks)) * self.kernel_blocks

    def entries(self, block_ids: Sequence[int]) -> Sequence[int] | np.ndarray:
        """Table entries (numbers of kernel blocks) of some blocks, in order. A pool block may be several kernel
        blocks."""
        if self.kernel_blocks == 1:
            return block_ids
        first = np.array(block_ids, np.int32)[:, None] * self.kernel_blocks
        return (first + np.arange(self.kernel_blocks, dtype=np.int32)).ravel()

    def slots(self, table: np.ndarray, sequence_index: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Slots of tokens, [T] int64; -1 for tokens of other ranks. table: [S, entries]. sequence_index, positions:
        [T]."""
        if self.deal.num_ranks == 1:
            logical, inside = np.divmod(positions, self.block_size)
            whole: np.ndarray = table[sequence_index, logical].astype(np.int64) * self.block_size + inside
            return whole
        size = self.block_size // self.deal.num_ranks
        logical, inside = positions // self.block_size, self.deal.kept(positions) % size
        slots = table[sequence_index, logical].astype(np.int64) * size + inside
        return np.where(self.deal.keeps(positions), slots, -1)


def table_shapes(layout: KVCacheLayout, deal: Deal = ALL_TOKENS) -> list[TableShape]:
    """Table shapes of a layout's groups, in order. deal: distribution of the dealt groups' tokens."""
    return [
        TableShape(
            layout.entry_tokens(group),
            layout.kernel_blocks(group),
            deal=deal if group.spec.dealt_to > 1 else ALL_TOKENS,
        )
        if group.spec.token_bytes
        else TableShape(group.block_size, has_slots=False)
        for group in layout.groups
    ]


class BlockTables:
    """Block tables on the host: per KV group [num_rows, max entries] int32, blocks in logical order, then
    NULL_BLOCK."""

    def __init__(self, shapes: Sequence[TableShape], num_rows: int, max_model_len: int) -> None:
        self.shapes = tuple(shapes)
        self.num_rows = num_rows
        assert NULL_BLOCK == 0, "zeros are reserved and not touched, other values would be"
        self._tables = tuple(np.zeros((num_rows, shape.width(max_model_len + 1)), np.int32) for shape in self.shapes)
        self._num_entries = np.zeros((len(self._tables), num_rows), np.int64)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Tables that kernels read, per KV group [num_rows, entries] int32."""
        return self._tables

    @property
    def num_groups(self) -> int:
        return len(self._tables)

    def num_entries(self, row: int) -> list[int]:
        """Number of entries in a row's table, per KV group."""
        counts: list[int] = self._num_entries[:, row].tolist()
        return counts

    def room(self, rows: np.ndarray) -> np.ndarray:
        """Number of positions of each row with slots in all KV groups, [R]. Checked before a step's positions are
        accepted."""
        sizes = np.array([shape.block_size if shape.has_slots else 0 for shape in self.shapes])
        kept = np.flatnonzero(sizes)
        found: np.ndarray = np.min(self._num_entries[kept][:, rows] * sizes[kept, None], axis=0)
        return found

    def append(self, row: int, block_ids: Sequence[Sequence[int]]) -> list[tuple[int, Sequence[int] | np.ndarray]]:
        """Append blocks to a row's tables. block_ids: per group. Returns per group the index of the first new entry,
        and the entries."""
        written = []
        for group, (shape, start, new) in enumerate(zip(self.shapes, self.num_entries(row), block_ids, strict=True)):
            entries = shape.entries(new)
            self._tables[group][row, start : start + len(entries)] = entries
            self._num_entries[group, row] = start + len(entries)
            written.append((start, entries))
        return written

    def replace(
        self, row: int, group: int, logical_index: int, block_id: int
    ) -> tuple[int, Sequence[int] | np.ndarray]:
        """Replace one block of a row's table (copy on write). Returns the index of the first written entry, and the
        entries."""
        shape = self.shapes[group]
        start, entries = logical_index * shape.kernel_blocks, shape.entries([block_id])
        assert start < self._num_entries[group, row], "only an entry that exists can be replaced"
        self._tables[group][row, start : start + len(entries)] = entries
        return start, entries

    def trim(self, row: int, kept: Sequence[int]) -> None:
        """Truncate a row's tables to `kept` blocks per group, after rejected drafts."""
        for group, (shape, table, count) in enumerate(zip(self.shapes, self._tables, kept, strict=True)):
            end, count = self._num_entries[group, row], count * shape.kernel_blocks
            if count < end:
                table[row, count:end] = NULL_BLOCK
                self._num_entries[group, row] = count

    def copy(self, source: int, destination: int) -> None:
        for table in self._tables:
            table[destination] = table[source]
        self._num_entries[:, destination] = self._num_entries[:, source]

    def clear(self, row: int) -> None:
        for group, table in enumerate(self._tables):
            table[row, : self._num_entries[group, row]] = NULL_BLOCK
        self._num_entries[:, row] = 0

    def gather(self, rows: np.ndarray, num_tokens: int) -> list[np.ndarray]:
        """Tables of `rows`, [S] int64, for `num_tokens` tokens: per group [S, width] int32."""
        return [
            table[rows, : -(-num_tokens // shape.block_size)]
            for table, shape in zip(self._tables, self.shapes, strict=True)
        ]

    def written(self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> list[int]:
        """Block ids, over all KV groups, that hold positions starts .. ends - 1 of `rows` (all [S] int64). They must
        not be in a transfer to the host."""
        blocks = []
        for table, shape in zip(self._tables, self.shapes, strict=True):
            first = starts // shape.block_size
            counts = (ends - 1) // shape.block_size - first + 1
            logical = np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)
            blocks.append(table[np.repeat(rows, counts), logical] // shape.kernel_blocks)
        distinct: list[int] = np.unique(np.concatenate(blocks)).tolist()
        return distinct
