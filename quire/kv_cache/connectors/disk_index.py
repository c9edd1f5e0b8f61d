"""The index of block contents on disk, from the scan at the start and the worker's reports since then.

Another engine that shares the directory may remove a file meanwhile: its load fails then, and the block is computed.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.transfers import BlockKey


class DiskIndex:
    """The hashes on disk, per KV group."""

    def __init__(self, num_groups: int) -> None:
        self._hashes: tuple[set[bytes], ...] = tuple(set() for _ in range(num_groups))

    def __len__(self) -> int:
        return sum(map(len, self._hashes))

    def __bool__(self) -> bool:
        return any(self._hashes)

    def __contains__(self, key: BlockKey) -> bool:
        return key[1] in self._hashes[key[0]]

    def insert(self, keys: Iterable[BlockKey]) -> None:
        """Keys of groups that the engine does not have (a foreign file) are left out."""
        for group, block_hash in keys:
            if group < len(self._hashes):
                self._hashes[group].add(block_hash)

    def remove(self, keys: Iterable[BlockKey]) -> None:
        for group, block_hash in keys:
            if group < len(self._hashes):
                self._hashes[group].discard(block_hash)

    def clear(self) -> None:
        for hashes in self._hashes:
            hashes.clear()
