"""Blocks of full and latent attention: a sequence keeps every block until it ends."""

from __future__ import annotations

from collections.abc import Sequence

from quire.kv_cache.prefix_index import Findable


class FullManager:
    """GroupManager of layers that read every earlier token."""

    keeps_all = True

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def first_needed_block(self, position: int) -> int:
        return 0

    def longest_hit(self, index: Findable, hashes: Sequence[bytes], num_blocks: int) -> int:
        """Any hit that is shorter than the result is a hit too."""
        for block in range(num_blocks):
            if index.find(hashes[block]) is None:
                return block
        return num_blocks

    def most_blocks(self, num_tokens: int, max_chunk: int) -> int:
        return -(-num_tokens // self.block_size)
