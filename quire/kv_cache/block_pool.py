"""Pool of physical blocks: ids, reference counts, allocation and eviction (paper §4.2, §4.4)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from quire.kv_cache.layout import NULL_BLOCK
from quire.kv_cache.prefix_index import PrefixIndex

FREE_STATE, MOST_OWNERS, CACHED_STATE = 0, 254, 255
"""Bytes of `BlockPool.states`."""


class BlockPool:
    """All blocks of one device except `NULL_BLOCK`. A block is used (reference count > 0), evictable (count 0, its
    content in a prefix index) or free (count 0, no content). Free blocks are handed out first, then the least recently
    used evictable one."""

    def __init__(self, num_blocks: int, indexes: Iterable[PrefixIndex]) -> None:
        self.num_usable = num_blocks - 1
        self.ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._evictable: OrderedDict[int, PrefixIndex] = OrderedDict()
        self._indexes = tuple(indexes)
        self.num_shared = 0
        self._group_of = [0] * num_blocks
        """KV group that a block serves, or served last."""
        self.num_used_of = [0] * max(1, len(self._indexes))
        self.num_references = 0
        """Sum of all reference counts: the blocks that owners would need without sharing."""
        self.num_evictions = 0

    @property
    def num_allocatable(self) -> int:
        return len(self._free) + len(self._evictable)

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_usable - len(self._free) - len(self._evictable)

    def is_evictable(self, block: int) -> bool:
        return block in self._evictable

    def count_evictable(self, blocks: Iterable[int]) -> int:
        return sum(map(self._evictable.__contains__, blocks))

    def allocate(self, group: int = 0) -> int:
        """Hand out one block with reference count 1; the caller has checked `num_allocatable`."""
        if self._free:
            block = self._free.pop()
        else:
            block, index = self._evictable.popitem(last=False)
            index.remove(block)
            self.num_evictions += 1
        self.ref_counts[block] = 1
        self._group_of[block] = group
        self.num_used_of[group] += 1
        self.num_references += 1
        return block

    def share(self, block: int) -> None:
        """Add an owner (a table entry or a transfer). An evictable block becomes used again."""
        count = self.ref_counts[block]
        if count == 0:
            del self._evictable[block]
            self.num_used_of[self._group_of[block]] += 1
        elif count == 1:
            self.num_shared += 1
        self.ref_counts[block] = count + 1
        self.num_references += 1

    def release(self, block: int) -> None:
        """Remove an owner. After the last one the block is evictable if its content is indexed, else free."""
        count = self.ref_counts[block] - 1
        assert count >= 0, f"block {block} released more often than it was taken"
        self.ref_counts[block] = count
        self.num_references -= 1
        if count == 1:
            self.num_shared -= 1
        elif count == 0:
            self.num_used_of[self._group_of[block]] -= 1
            for index in self._indexes:
                if block in index:
                    self._evictable[block] = index
                    return
            self._free.append(block)

    def forget(self, block: int) -> None:
        """Remove a block's content from the prefix index. A block without owners becomes free. Used when the content is
        in doubt."""
        for index in self._indexes:
            if block in index:
                index.remove(block)
        if self._evictable.pop(block, None) is not None:
            self._free.append(block)

    def drop_cached(self) -> int:
        """Empty the prefix indexes and free all evictable blocks; returns their number."""
        dropped = len(self._evictable)
        self._free.extend(self._evictable)
        self._evictable.clear()
        for index in self._indexes:
            index.clear()
        return dropped

    def states(self) -> bytes:
        """One byte per block: FREE_STATE, CACHED_STATE (evictable), or the number of owners, at most MOST_OWNERS. For
        snapshots (live view)."""
        try:
            states = bytearray(self.ref_counts).replace(b"\xff", b"\xfe")
        except ValueError:  # a count that no byte holds
            states = bytearray(min(count, MOST_OWNERS) for count in self.ref_counts)
        for block in self._evictable:
            states[block] = CACHED_STATE
        return bytes(states)

    def check(self, owners: dict[int, int]) -> None:
        """Compare with `owners` (block -> table entries that name it). Raises AssertionError."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert free.isdisjoint(self._evictable), "a block is free and evictable at once"
        assert NULL_BLOCK not in free | self._evictable.keys() | owners.keys(), "the null block was handed out"
        used = {block: count for block, count in enumerate(self.ref_counts) if count}
        assert used == owners, f"(block, owners) that differ from the counts: {owners.items() ^ used.items()}"
        assert free.isdisjoint(used), "a block is free and has owners"
        assert used.keys().isdisjoint(self._evictable), "a block is evictable and has owners"
        assert len(used) + len(free) + len(self._evictable) == self.num_usable, "a block is nowhere"
        groups = [self._group_of[block] for block in used]
        assert self.num_used_of == [groups.count(group) for group in range(len(self.num_used_of))], "groups are off"
        assert self.num_shared == sum(count > 1 for count in used.values()), "the count of shared blocks is off"
        assert self.num_references == sum(used.values()), "the count of references is off"
        for index in self._indexes:
            indexed = index.check()
            assert free.isdisjoint(indexed), "a free block is still indexed"
            assert NULL_BLOCK not in indexed, "the null block is indexed"
            cached = {block for block, place in self._evictable.items() if place is index}
            assert cached <= indexed, "an evictable block has no content"
