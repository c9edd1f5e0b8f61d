"""Blocks of recurrent layers: one live block a sequence, and snapshots of it in the prefix cache.

Logical block i of a sequence holds the state after its tokens up to (i + 1) * block_size, or after all of them where
they are fewer: the last entry of a table is the live block, which every step changes in place. When a sequence goes on
from a boundary, its next block starts as a copy, and the block behind it stays as it was: a snapshot, which the prefix
cache takes in when the step that ended on the boundary has reported. A step that crosses boundaries leaves no snapshot
at them; the live block then moves to its new place in the table, and NULL_BLOCK fills the entries between.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.kv_cache.layout import KVGroup
from quire.kv_cache.prefix_index import Findable


class StateManager:
    """GroupManager of layers that keep one state for a sequence. `block_size` is the snapshot interval."""

    keeps_all = False
    has_snapshots = True

    def __init__(self, group: KVGroup) -> None:
        self.block_size = group.block_size

    def first_needed_block(self, position: int) -> int:
        """The block with the state after `position` tokens."""
        return max(0, position - 1) // self.block_size

    def longest_hit(self, index: Findable, hashes: Sequence[bytes], num_blocks: int) -> int:
        """A hit needs the snapshot at its end alone."""
        for hit in range(num_blocks, 0, -1):
            if index.find(hashes[hit - 1]) is not None:
                return hit
        return 0

    def most_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """The live block and the snapshot that it was copied from."""
        return min(-(-num_tokens // self.block_size), 2)
