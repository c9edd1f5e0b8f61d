"""Which physical block holds which content: one table per KV group."""

from __future__ import annotations


class PrefixIndex:
    """hash -> block id. A block has at most one hash, a hash at most one block (the first that was computed)."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    def find(self, block_hash: bytes) -> int | None:
        return self._block_of.get(block_hash)

    def add(self, block_hash: bytes, block: int) -> None:
        """Enter a block whose content is complete. A second block with the same content stays out: it is freed with
        its sequence."""
        if block_hash in self._block_of or block in self._hash_of:
            return
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash

    def remove(self, block: int) -> None:
        """Forget the content of a block that gets a new owner."""
        del self._block_of[self._hash_of.pop(block)]

    def items(self) -> list[tuple[bytes, int]]:
        return list(self._block_of.items())

    def clear(self) -> None:
        self._block_of.clear()
        self._hash_of.clear()
