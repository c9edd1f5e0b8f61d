"""Prefix index: blocks by content, and the sequences about to compute one.

Each live sequence has at most one pending block: its first full block with known tokens that it has not offered yet,
which a prompt that shares it finds right after its hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.kv_cache.block_table import BlockTable


class Findable(Protocol):
    def find(self, block_hash: bytes) -> int | None:
        """Physical block with this content, None without one; asked as a prompt's hit is looked up."""
        ...


class PrefixIndex:
    """One KV group's index of cached content: hash -> block id. A block has at most one hash, a hash at most one block
    (the first computed)."""

    def __init__(self, num_blocks: int) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * num_blocks

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: int) -> bool:
        return self._hash_of[block] is not None

    def find(self, block_hash: bytes) -> int | None:
        return self._block_of.get(block_hash)

    def find_all(self, hashes: Sequence[bytes]) -> list[int]:
        return list(map(self._block_of.__getitem__, hashes))

    def insert(self, block_hash: bytes, block: int) -> None:
        """Enter a block whose content is complete; a second one with equal content stays out."""
        if block_hash in self._block_of or self._hash_of[block] is not None:
            return
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash

    def remove(self, block: int) -> None:
        block_hash = self._hash_of[block]
        assert block_hash is not None, f"block {block} has no content"
        del self._block_of[block_hash]
        self._hash_of[block] = None

    def clear(self) -> None:
        self._block_of.clear()
        self._hash_of = [None] * len(self._hash_of)

    def check(self) -> set[int]:
        """Assert that both directions agree; returns the blocks with content. O(blocks)."""
        indexed = {block: block_hash for block, block_hash in enumerate(self._hash_of) if block_hash is not None}
        assert {block: block_hash for block_hash, block in self._block_of.items()} == indexed, "index mismatch"
        return set(indexed)


class PendingBlocks:
    """hash -> running sequence that computes the block (the first of several); requests with the same prefix wait for
    it (PendingPrefixGate)."""

    def __init__(self, stride: int) -> None:
        """Start empty. stride: hash blocks of a pending block; every KV group has a full block at its end."""
        self._owners: dict[bytes, BlockTable] = {}
        self._stride = stride

    def find(self, block_hash: bytes) -> BlockTable | None:
        return self._owners.get(block_hash)

    def next_hash(self, blocks: BlockTable) -> bytes | None:
        """Hash of a sequence's next full block; None if its tokens are unknown."""
        chain, number = blocks.chain, (blocks.num_committed // self._stride + 1) * self._stride
        return None if chain is None or number > chain.num_blocks else chain.hashes[number]

    def renew(self, blocks: BlockTable) -> None:
        """Make a sequence's next full block pending, after a start or a commit, if its tokens are known."""
        self.drop(blocks)
        blocks.pending_hash = self.next_hash(blocks)
        if blocks.pending_hash is not None:
            self._owners.setdefault(blocks.pending_hash, blocks)

    def drop(self, blocks: BlockTable) -> None:
        if blocks.pending_hash is not None:
            if self._owners.get(blocks.pending_hash) is blocks:
                del self._owners[blocks.pending_hash]
            blocks.pending_hash = None

    def items(self) -> list[tuple[bytes, BlockTable]]:
        return list(self._owners.items())
