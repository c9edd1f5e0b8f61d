"""Which block contents are on their way: what live sequences are about to offer to the prefix index.

A sequence promises one block at a time: the first whose tokens are known and that it has not committed. Whoever shares
more with it hits exactly the blocks before that one and finds the promise at the end of the hit, so that one entry a
sequence is enough. A sequence that only generates promises nothing (its next block's tokens are not known).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.kv_cache.manager import BlockTable


class PendingBlocks:
    """hash -> the sequence that computes the block (the first one, where several do)."""

    def __init__(self) -> None:
        self._owners: dict[bytes, BlockTable] = {}

    def find(self, block_hash: bytes) -> BlockTable | None:
        return self._owners.get(block_hash)

    def renew(self, blocks: BlockTable) -> None:
        """Promise the next block of a sequence that has begun or committed; nothing when no more are known."""
        self.drop(blocks)
        chain = blocks.chain
        if chain is not None and blocks.num_committed < chain.num_blocks:
            blocks.pending_hash = chain.block_hash(blocks.num_committed)
            self._owners.setdefault(blocks.pending_hash, blocks)

    def drop(self, blocks: BlockTable) -> None:
        """Take a sequence's promise back, if it gave one."""
        if blocks.pending_hash is not None:
            if self._owners.get(blocks.pending_hash) is blocks:
                del self._owners[blocks.pending_hash]
            blocks.pending_hash = None

    def items(self) -> list[tuple[bytes, BlockTable]]:
        return list(self._owners.items())
