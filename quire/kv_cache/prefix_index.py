"""Which physical block holds which content: one table per KV group."""

from __future__ import annotations


class PrefixIndex:
    """hash -> block id. A block has at most one hash, a hash at most one block (the first that was computed)."""

    def __init__(self, num_blocks: int) -> None:
        """num_blocks: ids are below it."""
        self._block_of: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * num_blocks

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: int) -> bool:
        return self._hash_of[block] is not None

    def find(self, block_hash: bytes) -> int | None:
        return self._block_of.get(block_hash)

    def insert(self, block_hash: bytes, block: int) -> None:
        """Enter a block whose content is complete. A second block with the same content stays out: it is freed with
        its sequence."""
        if block_hash in self._block_of or self._hash_of[block] is not None:
            return
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash

    def remove(self, block: int) -> None:
        """Forget the content of a block."""
        block_hash = self._hash_of[block]
        assert block_hash is not None, f"block {block} has no content"
        del self._block_of[block_hash]
        self._hash_of[block] = None

    def clear(self) -> None:
        self._block_of.clear()
        self._hash_of = [None] * len(self._hash_of)

    def check(self) -> set[int]:
        """Assert that both directions agree; returns the blocks that have content. O(blocks)."""
        indexed = {block: block_hash for block, block_hash in enumerate(self._hash_of) if block_hash is not None}
        assert {block: block_hash for block_hash, block in self._block_of.items()} == indexed, "the index is torn"
        return set(indexed)
