"""Bounded pool of blocks in host memory, for preempted requests' KV (paper §4.5). A request moves whole."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from quire.kv_cache.block_pool import BlockPool
from quire.kv_cache.block_table import BlockTable
from quire.kv_cache.layout import NULL_BLOCK
from quire.kv_cache.prefix_index import PrefixIndex


class Footprint(NamedTuple):
    """Numbers of blocks that swapping a request out would move; a preemption chooses by them."""

    num_blocks_out: int
    """Distinct blocks to copy to the host."""
    num_blocks_in: int
    """Blocks to copy back, without those that other live sequences hold in the prefix index."""
    num_retained_blocks: int
    """Leading hash blocks of the first sequence that others hold in the prefix index, which recomputation would hit."""


class HostPool:
    """Host memory's blocks, 1 to `num_blocks`, for preempted sequences and KV connectors; `NULL_BLOCK` means the same
    as in device tables.

    While a sequence is here, its `BlockTable.tables` name host blocks; its other attributes stay.
    """

    def __init__(
        self,
        num_blocks: int,
        device: BlockPool,
        indexes: Sequence[PrefixIndex],
        strides: Sequence[int],
        host_indexes: Sequence[PrefixIndex] = (),
    ) -> None:
        """Pool of host blocks for swapped requests. indexes, strides: prefix indexes of the device, and hash blocks per
        block, for each KV group. host_indexes: indexes of host blocks that no swapped sequence needs
        (connectors/offload.py)."""
        self.blocks = BlockPool(num_blocks + 1, host_indexes)
        self._device = device
        self._indexes = tuple(indexes)
        self._strides = tuple(strides)
        self._swapped: dict[int, BlockTable] = {}

    @property
    def num_sequences(self) -> int:
        return len(self._swapped)

    def swap_out(self, sequences: Sequence[BlockTable]) -> list[tuple[int, int]] | None:
        """Move all blocks of a request here. Returns (device block, host block) pairs, or None, with nothing changed,
        without room for all."""
        sources = _distinct_blocks(sequences)
        if len(sources) > self.blocks.num_allocatable:
            return None
        host_of: dict[int, int] = {}
        for blocks in sequences:
            for table in blocks.tables:
                # Last first, as when a sequence is freed: a cached chain's tail is then evicted before its prefix.
                for index in range(len(table) - 1, -1, -1):
                    block = table[index]
                    if block == NULL_BLOCK:
                        continue
                    self._device.release(block)
                    if block in host_of:
                        self.blocks.share(host_of[block])
                    else:
                        host_of[block] = self.blocks.allocate()
                    table[index] = host_of[block]
            self._swapped[id(blocks)] = blocks
        return [(block, host_of[block]) for block in sources]

    def reused_blocks(self, sequences: Sequence[BlockTable]) -> set[int]:
        """Device blocks that `swap_in` would reuse instead of copying."""
        return set(self._cached(sequences).values())

    def blocks_to_return(self, sequences: Sequence[BlockTable]) -> tuple[int, int, int]:
        """Effect of `swap_in`: (device blocks allocated, evictable ones reused, blocks held afterwards)."""
        found = self._cached(sequences)
        reused = set(found.values())
        num_fresh = len(_distinct_blocks(sequences)) - len(found)
        return num_fresh, self._device.count_evictable(reused), num_fresh + len(reused)

    def swap_in(self, sequences: Sequence[BlockTable]) -> list[tuple[int, int]]:
        """Give a request device blocks again; the caller has checked the room. Returns (host block, device block) pairs
        to copy; blocks that the prefix index still has on the device are reused."""
        found = self._cached(sequences)
        # Share the reused blocks first, so that allocating the rest does not evict them.
        for block in set(found.values()):
            self._device.share(block)
        fresh: dict[int, int] = {}
        for blocks in sequences:
            for group, table in enumerate(blocks.tables):
                for host in table:
                    if host != NULL_BLOCK and host not in found and host not in fresh:
                        fresh[host] = self._device.allocate(group)
        device_of = found | fresh
        for blocks in sequences:
            del self._swapped[id(blocks)]
            blocks.num_committed = self._num_leading(blocks, found)
            for table in blocks.tables:
                for index, host in enumerate(table):
                    if host != NULL_BLOCK:
                        table[index] = device_of[host]
                        self._device.share(device_of[host])
                        self.blocks.release(host)
        # Release the temporary shares, now that tables own the blocks.
        for block in set(device_of.values()):
            self._device.release(block)
        return list(fresh.items())

    def free(self, blocks: BlockTable) -> None:
        del self._swapped[id(blocks)]
        for table in blocks.tables:
            for block in table:
                if block != NULL_BLOCK:
                    self.blocks.release(block)
        blocks.tables = []

    def __contains__(self, blocks: BlockTable) -> bool:
        return id(blocks) in self._swapped

    def footprint(self, sequences: Sequence[BlockTable]) -> Footprint:
        """Costs of swapping a request that is on the device, in blocks."""
        distinct = _distinct_blocks(sequences)
        owned = dict.fromkeys(distinct, 0)
        for block in _blocks(sequences):
            owned[block] += 1
        # Blocks that only this request holds become evictable, and the request that replaces it evicts them.
        retained = {
            block
            for block, count in owned.items()
            if self._device.ref_counts[block] > count and any(block in index for index in self._indexes)
        }
        return Footprint(len(distinct), len(distinct) - len(retained), self._num_leading(sequences[0], retained))

    def check(self, owners: dict[int, int]) -> None:
        """Assert that counts, free list and tables of host blocks agree. O(blocks). owners: block -> owners without
        swapped sequences, which it adds in place."""
        for block in _blocks(self._swapped.values()):
            owners[block] = owners.get(block, 0) + 1
        self.blocks.check(owners)
        for blocks in self._swapped.values():
            assert blocks.pending_hash is None, "a swapped sequence has a pending block"

    def _cached(self, sequences: Sequence[BlockTable]) -> dict[int, int]:
        """Sequences' host blocks -> device blocks with equal content, by the prefix index."""
        found: dict[int, int] = {}
        for blocks in sequences:
            if blocks.chain is None:
                continue
            for index, table, stride in zip(self._indexes, blocks.tables, self._strides, strict=True):
                for number, host in enumerate(table[: blocks.num_committed // stride]):
                    if host != NULL_BLOCK and host not in found:
                        block = index.find(blocks.chain.block_hash((number + 1) * stride - 1))
                        if block is not None:
                            found[host] = block
        return found

    def _num_leading(self, blocks: BlockTable, known: Collection[int]) -> int:
        for number in range(1, blocks.num_committed + 1):
            for table, stride in zip(blocks.tables, self._strides, strict=True):
                block = NULL_BLOCK if number % stride else table[number // stride - 1]
                if block != NULL_BLOCK and block not in known:
                    return number - 1
        return blocks.num_committed


def _blocks(sequences: Iterable[BlockTable]) -> Iterator[int]:
    return (block for blocks in sequences for table in blocks.tables for block in table if block != NULL_BLOCK)


def _distinct_blocks(sequences: Iterable[BlockTable]) -> list[int]:
    return list(dict.fromkeys(_blocks(sequences)))
