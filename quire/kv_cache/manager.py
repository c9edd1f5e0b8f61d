"""The one face of the KV cache that the scheduler sees: match, begin, append, fork, commit, free, check.

Block ids are opaque to the scheduler; it passes them into the plan. All calls either succeed or change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.kv_cache.block_hash import HashChain
from quire.kv_cache.block_pool import BlockPool
from quire.kv_cache.groups import hit_blocks, rules_for
from quire.kv_cache.layout import NULL_BLOCK, KVCacheLayout
from quire.kv_cache.prefix_index import PrefixIndex
from quire.kv_cache.promises import Promises


class SequenceBlocks:
    """The block tables of one sequence: per group, logical index -> physical block. Owned by the manager."""

    __slots__ = ("capacity", "chain", "num_committed", "promised", "tables", "tail_shared")

    def __init__(self, tables: list[list[int]], capacity: int, chain: HashChain | None) -> None:
        self.tables = tables
        self.capacity = capacity
        """Token slots: number of table entries times the block size."""
        self.chain = chain
        self.num_committed = 0
        """Leading blocks whose content was offered to the prefix index."""
        self.promised: bytes | None = None
        """Hash of the block that this sequence offers next, if its tokens are known already."""
        self.tail_shared = False
        """The last, partly filled block may have other owners: copy before writing (paper §4.4)."""


class Growth:
    """What `append` did, for the plan: blocks appended per group, table entries replaced, blocks to copy."""

    __slots__ = ("copies", "new_blocks", "replaced")

    def __init__(self, new_blocks: list[list[int]]) -> None:
        self.new_blocks = new_blocks
        self.replaced: list[tuple[int, int, int]] = []
        """(group, logical index, new block)"""
        self.copies: list[tuple[int, int]] = []
        """(source, destination)"""


class KVCacheManager:
    """Allocates, shares, copies on write, caches and evicts the blocks of one pool."""

    def __init__(self, layout: KVCacheLayout, *, enable_prefix_caching: bool) -> None:
        self.block_size = layout.block_size
        self.block_bytes = layout.block_bytes
        self.enable_prefix_caching = enable_prefix_caching
        self.num_groups = len(layout.groups)
        self._rules = [rules_for(group.spec, layout.block_size) for group in layout.groups]
        self._indexes = [PrefixIndex() for _ in layout.groups]
        self.pool = BlockPool(layout.num_blocks, self._indexes)
        self._live: dict[int, SequenceBlocks] = {}
        self._promises = Promises()

    # -- looking up -------------------------------------------------------------------------------------------------

    def new_chain(self, salt: str) -> HashChain | None:
        """The hash chain of a new sequence; None when caching is off."""
        return HashChain(self.block_size, salt) if self.enable_prefix_caching else None

    def match_prefix(self, chain: HashChain | None, token_ids: Sequence[int], max_tokens: int) -> int:
        """Tokens (whole blocks, at most `max_tokens`) whose KV is cached in every group. Changes nothing."""
        num_blocks = max_tokens // self.block_size
        if chain is None or num_blocks == 0:
            return 0
        chain.extend(token_ids, num_blocks)
        hashes = chain.hashes[1:]
        # Sliding-window hits are not closed under shortening, so repeat until all groups agree.
        agreed = None
        while agreed != num_blocks:
            agreed = num_blocks
            for rules, index in zip(self._rules, self._indexes, strict=True):
                num_blocks = rules.longest_hit(index, hashes, num_blocks)
        return num_blocks * self.block_size

    def find_computing(
        self, chain: HashChain | None, num_cached_tokens: int, max_tokens: int
    ) -> tuple[SequenceBlocks, int] | None:
        """Who computes the block right behind a hit, and how many leading blocks it shares with the chain.

        `num_cached_tokens` as `match_prefix` returned it for the same `max_tokens`. None when nobody does.
        """
        block, limit = num_cached_tokens // self.block_size, max_tokens // self.block_size
        if chain is None or block >= limit:
            return None
        leader = self._promises.find(chain.block_hash(block))
        if leader is None or leader.chain is None:
            return None
        return leader, min(limit, leader.chain.num_shared(chain))

    def is_computing(self, blocks: SequenceBlocks, num_blocks: int) -> bool:
        """Whether a sequence lives and has yet to commit some of its first `num_blocks` blocks."""
        return blocks.promised is not None and blocks.num_committed < num_blocks

    def room_after_match(self, chain: HashChain | None, num_tokens: int) -> tuple[int, int]:
        """(allocatable blocks left after `begin` with this hit, blocks that the hit itself holds)."""
        free, held = self.pool.num_allocatable, 0
        if chain is not None and num_tokens:
            for table in self._hit_tables(chain, num_tokens):
                for block in table:
                    if block != NULL_BLOCK:
                        held += 1
                        free -= self.pool.is_evictable(block)
        return free, held

    # -- owning -----------------------------------------------------------------------------------------------------

    def begin(self, chain: HashChain | None, num_cached_tokens: int) -> SequenceBlocks:
        """Start a sequence that owns the blocks of a hit (`num_cached_tokens` as `match_prefix` returned it)."""
        if chain is not None and num_cached_tokens:
            tables = self._hit_tables(chain, num_cached_tokens)
        else:
            tables = [[] for _ in self._rules]
        for table in tables:
            for block in table:
                if block != NULL_BLOCK:
                    self.pool.share(block)
        blocks = SequenceBlocks(tables, num_cached_tokens, chain)
        blocks.num_committed = num_cached_tokens // self.block_size
        self._live[id(blocks)] = blocks
        self._promises.renew(blocks)
        return blocks

    def append(self, blocks: SequenceBlocks, start: int, end: int) -> Growth | None:
        """Make slots for positions start .. end - 1 writable by this sequence alone.

        Gives back blocks that no query from `start` on reads, appends blocks for the rest, copies a shared tail.
        Returns None, having allocated nothing, when the pool has too few blocks.
        """
        self._release_outside_windows(blocks, start)
        size, pool = self.block_size, self.pool
        num_new = max(0, -(-(end - blocks.capacity) // size))
        tail = start // size
        copied_groups = []
        if blocks.tail_shared:
            copied_groups = [
                group
                for group, table in enumerate(blocks.tables)
                if tail < len(table) and pool.ref_counts[table[tail]] > 1
            ]
        if num_new * len(blocks.tables) + len(copied_groups) > pool.num_allocatable:
            return None
        blocks.tail_shared = False
        growth = Growth([[pool.allocate() for _ in range(num_new)] for _ in blocks.tables])
        for table, new in zip(blocks.tables, growth.new_blocks, strict=True):
            table.extend(new)
        blocks.capacity += num_new * size
        for group in copied_groups:
            table = blocks.tables[group]
            source, table[tail] = table[tail], pool.allocate()
            pool.release(source)
            growth.replaced.append((group, tail, table[tail]))
            growth.copies.append((source, table[tail]))
        return growth

    def fork(self, parent: SequenceBlocks, num_tokens: int) -> SequenceBlocks:
        """A sequence that shares the parent's blocks of its first `num_tokens` tokens (the parent's whole tables)."""
        assert parent.capacity - self.block_size < num_tokens <= parent.capacity, "fork in the middle of a table"
        for table in parent.tables:
            for block in table:
                if block != NULL_BLOCK:
                    self.pool.share(block)
        num_full = num_tokens // self.block_size
        chain = parent.chain
        if chain is not None:
            chain = chain.fork(min(num_full, len(chain.hashes) - 1))
        child = SequenceBlocks([list(table) for table in parent.tables], parent.capacity, chain)
        child.num_committed = min(parent.num_committed, num_full)
        if num_tokens % self.block_size:
            child.tail_shared = parent.tail_shared = True
        self._live[id(child)] = child
        return child

    def commit(self, blocks: SequenceBlocks, token_ids: Sequence[int], num_computed: int) -> None:
        """Offer full, computed blocks (positions below `num_computed`, tokens known) to the prefix index."""
        chain = blocks.chain
        num_full = num_computed // self.block_size
        if chain is None or num_full <= blocks.num_committed:
            return
        chain.extend(token_ids, num_full)
        for block in range(blocks.num_committed, num_full):
            block_hash = chain.block_hash(block)
            for index, table in zip(self._indexes, blocks.tables, strict=True):
                if table[block] != NULL_BLOCK:
                    index.add(block_hash, table[block])
        blocks.num_committed = num_full
        if blocks.promised is not None:
            self._promises.renew(blocks)

    def free(self, blocks: SequenceBlocks) -> None:
        """Give up all blocks, last first: of a cached chain the tail is then evicted before its prefix."""
        del self._live[id(blocks)]
        self._promises.drop(blocks)
        for table in blocks.tables:
            for block in reversed(table):
                if block != NULL_BLOCK:
                    self.pool.release(block)
        blocks.tables = []

    def reset_prefix_cache(self) -> int:
        """Forget all cached content (blocks in use stay in use). Returns the number of blocks set free."""
        # What is computed now will still be committed, but never be hit without the blocks before it.
        for blocks in self._live.values():
            self._promises.drop(blocks)
        return self.pool.drop_cached()

    # -- bounds and invariants --------------------------------------------------------------------------------------

    def most_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """Blocks that one sequence of `num_tokens` holds at most, over all groups."""
        return sum(rules.most_blocks(num_tokens, max_chunk) for rules in self._rules)

    def check(self) -> None:
        """Assert every invariant of tables, counts, lists and indexes. O(blocks)."""
        owners: dict[int, int] = {}
        for blocks in self._live.values():
            assert len(blocks.tables) == len(self._rules)
            for table in blocks.tables:
                assert len(table) * self.block_size == blocks.capacity, "table and capacity disagree"
                held = [block for block in table if block != NULL_BLOCK]
                assert len(set(held)) == len(held), "a table names a block twice"
                for block in held:
                    owners[block] = owners.get(block, 0) + 1
        self.pool.check(owners)
        for block_hash, blocks in self._promises.items():
            assert id(blocks) in self._live, "a sequence that is gone promises a block"
            assert blocks.chain is not None
            assert blocks.promised == block_hash == blocks.chain.block_hash(blocks.num_committed), "a promise is stale"

    @property
    def num_live_sequences(self) -> int:
        return len(self._live)

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _hit_tables(self, chain: HashChain, num_tokens: int) -> list[list[int]]:
        num_blocks = num_tokens // self.block_size
        hashes = chain.hashes[1 : num_blocks + 1]
        return [
            hit_blocks(rules, index, hashes, num_blocks, self.block_size)
            for rules, index in zip(self._rules, self._indexes, strict=True)
        ]

    def _release_outside_windows(self, blocks: SequenceBlocks, start: int) -> None:
        for rules, table in zip(self._rules, blocks.tables, strict=True):
            for index in range(min(rules.first_needed_block(start), len(table)) - 1, -1, -1):
                if table[index] == NULL_BLOCK:
                    break
                self.pool.release(table[index])
                table[index] = NULL_BLOCK
