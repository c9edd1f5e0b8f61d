"""Loads cached prefixes from the KV connector to the device, for requests that are about to start.

The connector first fetches blocks that are only on disk to the host. Then the loader allocates device blocks and orders
their copies, which takes one plan: from the next plan on they are in the prefix index like any other block, and the
request starts with a plain hit. During that plan the request owns all blocks of its hit. The loader releases them when
the request does not start in the next pass, or when running requests need them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.kv_cache.block_hash import HashChain
from quire.kv_cache.block_pool import BlockPool
from quire.kv_cache.connector import KVConnector
from quire.kv_cache.coordinator import Coordinator
from quire.kv_cache.disk_index import BlockKey
from quire.kv_cache.layout import NULL_BLOCK
from quire.kv_cache.prefix_index import PrefixIndex

MIN_BLOCKS = 2
"""Fewer blocks are computed: loading them takes a step, which reads all weights and costs about as much as a block."""


class Reach(NamedTuple):
    """A prefix hit that continues in the KV connector."""

    num_blocks: int
    """Leading hash blocks of the prompt, those on the device included."""
    on_device: list[BlockKey]
    on_host: list[BlockKey]
    on_disk: list[BlockKey]


class PrefixLoader:
    """Shares the device's pool, prefix indexes (one per KV group) and coordinator with the KV manager."""

    def __init__(
        self,
        pool: BlockPool,
        indexes: Sequence[PrefixIndex],
        groups: Coordinator,
        connector: KVConnector,
    ) -> None:
        self.connector = connector
        self._pool = pool
        self._indexes = indexes
        self._groups = groups
        self._held: list[int] = []
        """Device blocks that requests own through this pass and the next, one entry for each share."""
        self._due: list[int] = []
        """Shares of the pass before, released at the end of this one."""
        self._arriving: dict[BlockKey, int] = {}
        """Device blocks that the plan at hand swaps in."""

    def reach(self, chain: HashChain | None, num_cached_tokens: int, max_tokens: int, *, fetch: bool) -> Reach | None:
        """How far a hit goes with the KV connector's blocks; None when that is less than MIN_BLOCKS further.

        num_cached_tokens: as `match_prefix` returned it for the same `max_tokens`. fetch: count what is on disk, as far
        as it can be fetched now.
        """
        if chain is None or not self.connector.has_content:
            return None
        size = self._groups.block_size
        least, limit = num_cached_tokens + MIN_BLOCKS * size, max_tokens - max_tokens % size
        views = [_View(self, group, fetch=fetch) for group in range(len(self._indexes))]
        while limit >= least:
            limit = self._groups.agreed_hit(views, chain.hashes, limit)
            if limit < least:
                break
            reach = self._sort(chain, limit)
            excess = len(reach.on_disk) - self.connector.num_loadable if reach.on_disk else 0
            if excess <= 0:
                return reach
            limit -= -(-excess // len(views)) * size
        return None

    def blocks_to_bring(self, reach: Reach) -> int:
        """How many blocks `bring` takes from the allocatable ones."""
        hits = (self._indexes[group].find(block_hash) for group, block_hash in reach.on_device)
        num_evictable = sum(block is not None and self._pool.is_evictable(block) for block in hits)
        return num_evictable + sum(key not in self._arriving for key in reach.on_host)

    def bring(self, reach: Reach) -> int:
        """Order what is on the host to be swapped in, and own the whole hit until the next pass. The caller has made
        sure that there is room for it. Returns how many blocks were allocated."""
        assert not reach.on_disk
        pool, num_before = self._pool, self._pool.num_allocatable
        hits = [self._indexes[group].find(block_hash) for group, block_hash in reach.on_device]
        for block in hits:  # all of them before one is allocated, which could evict them
            assert block is not None
            pool.share(block)
            self._held.append(block)
        for key in reach.on_host:
            block = self._arriving.get(key)
            if block is None:
                block = self._arriving[key] = pool.allocate()
                self.connector.bring(key, block)
            else:
                pool.share(block)
            self._held.append(block)
        return num_before - pool.num_allocatable

    def arrive(self) -> None:
        """Start a new pass: enter the blocks that the plan before copied in into the prefix index."""
        for (group, block_hash), block in self._arriving.items():
            self._indexes[group].insert(block_hash, block)
        self._arriving.clear()
        self._due += self._held
        self._held = []

    def reset(self) -> None:
        """Forget all content of the KV connector, blocks being copied included: deferred requests find no hit."""
        self.connector.reset()
        self._arriving.clear()

    @property
    def is_holding(self) -> bool:
        """Whether blocks are held for requests that have not started, or ended since."""
        return bool(self._held or self._due)

    def release(self) -> bool:
        """Release what requests own since the pass before; those that started have shares of their own. Returns whether
        there was anything."""
        due, self._due = self._due, []
        for block in reversed(due):
            self._pool.release(block)
        return bool(due)

    def check(self, owners: dict[int, int]) -> None:
        """Add the shares of device blocks to `owners` (block -> owners)."""
        for block in (*self._held, *self._due):
            owners[block] = owners.get(block, 0) + 1
        assert set(self._arriving.values()) <= set(self._held), "a block is copied in without an owner"

    def _find(self, key: BlockKey, *, fetch: bool) -> int | None:
        block = self._indexes[key[0]].find(key[1])
        if block is None:
            block = self._arriving.get(key)
        if block is None:
            block = self.connector.find(key)
        if block is None and fetch and self.connector.is_on_disk(key):
            return NULL_BLOCK
        return block

    def _sort(self, chain: HashChain, num_tokens: int) -> Reach:
        """Where the blocks are that a hit of `num_tokens` needs."""
        reach = Reach(num_tokens // self._groups.block_size, [], [], [])
        groups = zip(self._groups.managers, self._groups.strides, self._indexes, strict=True)
        for group, (manager, stride, index) in enumerate(groups):
            for number in range(manager.first_needed_block(num_tokens), num_tokens // manager.block_size):
                key = (group, chain.block_hash((number + 1) * stride - 1))
                if index.find(key[1]) is not None:
                    reach.on_device.append(key)
                elif key in self._arriving or self.connector.find(key) is not None:
                    reach.on_host.append(key)
                else:
                    reach.on_disk.append(key)
        return reach


class _View:
    """A KV group's contents on the device and in the connector, for `agreed_hit`, which only tests for None."""

    def __init__(self, loader: PrefixLoader, group: int, *, fetch: bool) -> None:
        self._loader = loader
        self._group = group
        self._fetch = fetch

    def find(self, block_hash: bytes) -> int | None:
        return self._loader._find((self._group, block_hash), fetch=self._fetch)
