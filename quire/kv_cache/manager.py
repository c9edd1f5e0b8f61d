"""KV cache manager, the scheduler's interface to the KV cache. Every call succeeds or changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import mul

from quire.kv_cache.block_hash import NO_KEYS, HashChain
from quire.kv_cache.block_pool import BlockPool
from quire.kv_cache.block_table import BlockAllocation, BlockTable
from quire.kv_cache.connectors.interface import ConnectorFactory, Pools, no_connector
from quire.kv_cache.connectors.transfer_blocks import TransferBlocks
from quire.kv_cache.coordinator import Coordinator
from quire.kv_cache.host_pool import Footprint, HostPool
from quire.kv_cache.layout import NULL_BLOCK, KVCacheLayout
from quire.kv_cache.prefix_index import PendingBlocks, PrefixIndex
from quire.kv_cache.registered_prefixes import RegisteredPrefix, RegisteredPrefixes


class KVCacheManager:
    def __init__(
        self,
        layout: KVCacheLayout,
        *,
        enable_prefix_caching: bool,
        make_connector: ConnectorFactory = no_connector,
    ) -> None:
        """Manager of one pool. make_connector: makes the KV connector, which stores cached blocks outside the
        device."""
        self.groups = Coordinator(layout.groups)
        self.hash_block_size = self.groups.hash_block_size
        self.block_bytes = layout.block_bytes
        self.enable_prefix_caching = enable_prefix_caching
        self.num_groups = len(layout.groups)
        self.windows = [group.spec.window for group in layout.groups]
        """Sliding window of each group in tokens; None: full attention."""
        managers = self.groups.managers
        self._sizes = self.groups.sizes
        self.uniform_size = self.hash_block_size if len(set(self._sizes)) == 1 else 0
        """Tokens of every block if all groups have one size, whose tables then grow alike; else 0."""
        has_slots = [group.spec.token_bytes > 0 for group in layout.groups]
        self.token_groups = tuple((g, size) for g, size in enumerate(self._sizes) if has_slots[g])
        """(group, slots of its blocks) of the groups with a slot for each token."""
        self._slots_of_block = tuple(size if has else 1 for size, has in zip(self._sizes, has_slots, strict=True))
        self._releasing = tuple(group for group, manager in enumerate(managers) if not manager.keeps_all)
        self._indexes = [PrefixIndex(layout.num_blocks) for _ in layout.groups]
        self.pool = BlockPool(layout.num_blocks, self._indexes)
        host_indexes = [PrefixIndex(layout.num_host_blocks + 1) for _ in layout.groups]
        self.host = HostPool(layout.num_host_blocks, self.pool, self._indexes, self.groups.strides, host_indexes)
        self.transfer_blocks = TransferBlocks(self.pool, self._indexes, self.groups)
        self.connector = make_connector(Pools(self._indexes, self.host.blocks, host_indexes, self.transfer_blocks))
        self._live: dict[int, BlockTable] = {}
        self._pending_blocks = PendingBlocks(self.groups.hit_size // self.hash_block_size)
        self._registered = RegisteredPrefixes(self.hash_block_size)

    # -- looking up -------------------------------------------------------------------------------------------------

    def new_chain(self, salt: str, extra_keys: Mapping[int, tuple[bytes, ...]] = NO_KEYS) -> HashChain | None:
        """Hash chain of a new sequence; None without caching."""
        return HashChain(self.hash_block_size, salt, extra_keys) if self.enable_prefix_caching else None

    def match_prefix(self, chain: HashChain | None, token_ids: Sequence[int], max_tokens: int) -> int:
        """Tokens (at most `max_tokens`) with KV cached in every group: whole blocks, or a longer registered prefix with
        its partial last block. Changes nothing."""
        if chain is None:
            return 0
        chain.extend(token_ids, max_tokens // self.hash_block_size)
        num_tokens = self.groups.agreed_hit(self._indexes, chain.hashes, max_tokens)
        prefix = self._registered.longest(chain, token_ids, max_tokens, num_tokens + 1)
        return num_tokens if prefix is None else prefix.num_tokens

    def find_pending(
        self, chain: HashChain | None, num_cached_tokens: int, max_tokens: int
    ) -> tuple[BlockTable, int] | None:
        """Find a computation to wait for: (the sequence that computes the block right after a hit, leading hash blocks
        that it shares with the chain); None: nothing to wait for. num_cached_tokens: result of `match_prefix` for the
        same `max_tokens`."""
        step = self.groups.hit_size // self.hash_block_size
        block, limit = num_cached_tokens // self.groups.hit_size, max_tokens // self.groups.hit_size
        if chain is None or block >= limit:
            return None
        leader = self._pending_blocks.find(chain.block_hash((block + 1) * step - 1))
        if leader is None or leader.chain is None:
            return None
        return leader, min(limit, leader.chain.num_shared(chain) // step) * step

    def is_pending_in(self, blocks: BlockTable, num_blocks: int) -> bool:
        """True while the sequence of `blocks` lives and has not yet computed all of its first `num_blocks` hash
        blocks."""
        return blocks.pending_hash is not None and blocks.num_committed < num_blocks

    def room_after_match(
        self, chain: HashChain | None, num_tokens: int, token_ids: Sequence[int] = ()
    ) -> tuple[int, int]:
        """(allocatable blocks left after `allocate_prefix` with this hit, blocks that the hit owns and that no later
        step releases). For admission."""
        free, held = self.pool.num_allocatable, 0
        if chain is not None and num_tokens:
            for size, table in zip(self._sizes, self._hit_tables(chain, num_tokens, token_ids), strict=True):
                # A partial last block is replaced by a copy at once.
                blocks = table[: num_tokens // size]
                held += len(blocks) - blocks.count(NULL_BLOCK)
                free -= self.pool.count_evictable(blocks)
        return free, held

    def hit_blocks(self, chain: HashChain | None, num_tokens: int, token_ids: Sequence[int]) -> set[int]:
        """Device blocks that a hit of `num_tokens` (see `allocate_prefix`) would own. A preemption's plan counts them
        as kept."""
        if chain is None or not num_tokens:
            return set()
        tables = self._hit_tables(chain, num_tokens, token_ids)
        return {block for table in tables for block in table if block != NULL_BLOCK}

    def num_freed_by(self, sequences: Iterable[BlockTable], kept: set[int]) -> int:
        """Number of blocks, without those in `kept`, that freeing these sequences leaves without owners. For planning
        preemptions."""
        owners: Counter[int] = Counter()
        for blocks in sequences:
            for table in blocks.tables:
                owners.update(table)
        counts = self.pool.ref_counts
        return sum(
            count == counts[block] for block, count in owners.items() if block != NULL_BLOCK and block not in kept
        )

    # -- ownership ------------------------------------------------------------------------------------------------

    def allocate_prefix(
        self, chain: HashChain | None, num_cached_tokens: int, token_ids: Sequence[int] = ()
    ) -> BlockTable:
        """Start a sequence that owns the blocks of a hit. num_cached_tokens, token_ids: result and argument of
        `match_prefix`; tokens are needed only with registered prefixes."""
        if chain is not None and num_cached_tokens:
            tables = self._hit_tables(chain, num_cached_tokens, token_ids)
            for group, (table, stride) in enumerate(zip(tables, self.groups.strides, strict=True)):
                first = table.count(NULL_BLOCK) + 1
                self.connector.reuse(group, chain.hashes[first * stride : (len(table) + 1) * stride : stride])
        else:
            tables = [[] for _ in self._indexes]
        for table in tables:
            for block in table:
                if block != NULL_BLOCK:
                    self.pool.share(block)
        blocks = BlockTable(tables, self.groups.num_slots(tables), chain)
        blocks.first_held = [table.count(NULL_BLOCK) for table in tables]
        blocks.num_committed = num_cached_tokens // self.hash_block_size
        blocks.tail_shared = bool(num_cached_tokens % self.groups.hit_size)
        self._live[id(blocks)] = blocks
        self._pending_blocks.renew(blocks)
        return blocks

    def allocate_slots(self, blocks: BlockTable, start: int, end: int) -> BlockAllocation | None:
        """Make slots for positions start .. end - 1 writable by this sequence alone: release blocks that no query from
        `start` on reads, append blocks, copy a shared tail. Returns None, with nothing allocated, when the pool has too
        few blocks."""
        pool, tables, uniform_size = self.pool, blocks.tables, self.uniform_size
        if self._releasing:
            self._release_unneeded(blocks, start, is_late=True)
        if uniform_size:
            num_new = max(0, -(-(end - blocks.capacity) // uniform_size))
            counts, needed = [num_new] * len(tables), num_new * len(tables)
        else:
            counts = [max(0, -(-end // size) - len(table)) for size, table in zip(self._sizes, tables, strict=True)]
            needed = sum(counts)
        tail_was_shared = blocks.tail_shared
        copied_groups = self._shared_at(tables, start) if tail_was_shared else []
        needed += len(copied_groups)
        if needed > pool.num_allocatable:
            self._release_unneeded(blocks, start)
            if needed > pool.num_allocatable:
                self.transfer_blocks.release()
                if needed > pool.num_allocatable:
                    return None
        new_blocks = [[pool.allocate(group) for _ in range(count)] for group, count in enumerate(counts)]
        allocation = BlockAllocation(new_blocks, tail_was_shared)
        blocks.tail_shared = False
        for group in copied_groups:
            table, tail = tables[group], start // self._sizes[group]
            source, table[tail] = table[tail], pool.allocate(group)
            pool.release(source)
            allocation.replaced.append((group, tail, table[tail]))
            allocation.copies.append((source, table[tail]))
        for table, new in zip(tables, new_blocks, strict=True):
            table += new
        blocks.capacity = blocks.capacity + counts[0] * uniform_size if uniform_size else self.groups.num_slots(tables)
        return allocation

    def _shared_at(self, tables: Sequence[list[int]], position: int) -> list[int]:
        places = [position // size for size in self._sizes]
        ref_counts = self.pool.ref_counts
        return [
            group
            for group, (place, table) in enumerate(zip(places, tables, strict=True))
            if place < len(table) and ref_counts[table[place]] > 1
        ]

    def rollback(self, blocks: BlockTable, allocation: BlockAllocation) -> None:
        """Undo the last `allocate_slots` of a sequence; of several, the latest first. Blocks that left a sliding window
        stay released. For a plan that preempts a sequence it had scheduled."""
        for (group, index, copy), (source, _) in zip(allocation.replaced, allocation.copies, strict=True):
            # A sibling still owns the source: it was copied because it was shared, and the last owner writes in place.
            self.pool.share(source)
            self.pool.release(copy)
            blocks.tables[group][index] = source
        for table, new in zip(blocks.tables, allocation.new_blocks, strict=True):
            for block in reversed(new):
                self.pool.release(block)
            del table[len(table) - len(new) :]
        blocks.capacity = self.groups.num_slots(blocks.tables)
        blocks.tail_shared = allocation.tail_was_shared

    def trim(self, blocks: BlockTable, num_tokens: int) -> list[int]:
        """Release the blocks after the first `num_tokens` tokens. Returns the entries kept per group, or [] if all
        are."""
        sizes = self._sizes
        if len(sizes) == 1 and blocks.capacity - num_tokens < sizes[0]:
            return []
        kept = [-(-num_tokens // size) for size in sizes]
        if all(len(table) <= num for table, num in zip(blocks.tables, kept, strict=True)):
            return []
        for table, num in zip(blocks.tables, kept, strict=True):
            for block in reversed(table[num:]):
                self.pool.release(block)
            del table[num:]
        blocks.capacity = self.groups.num_slots(blocks.tables)
        return kept

    def fork(self, parent: BlockTable, num_tokens: int) -> BlockTable:
        """Sequence that shares the parent's blocks of its first `num_tokens` tokens (its whole tables)."""
        assert self.groups.fits(parent.tables, num_tokens), "fork in the middle of a table"
        for table in parent.tables:
            for block in table:
                if block != NULL_BLOCK:
                    self.pool.share(block)
        num_full = num_tokens // self.hash_block_size
        chain = parent.chain
        if chain is not None:
            chain = chain.fork(min(num_full, len(chain.hashes) - 1))
        child = BlockTable([list(table) for table in parent.tables], parent.capacity, chain)
        child.first_held = parent.first_held.copy()
        child.num_committed = min(parent.num_committed, num_full)
        if num_tokens % self.groups.hit_size:
            child.tail_shared = parent.tail_shared = True
        self._live[id(child)] = child
        return child

    def cache_blocks(self, blocks: BlockTable, token_ids: Sequence[int], num_computed: int) -> None:
        """Make a sequence's full blocks below position `num_computed` findable in the prefix index; their tokens must
        be known. Called when a step's result has come."""
        chain = blocks.chain
        num_full = num_computed // self.hash_block_size
        if chain is None or num_full <= blocks.num_committed:
            return
        chain.extend(token_ids, num_full)
        offer, hashes = self.connector.offer, chain.hashes
        indexes, tables, strides = self._indexes, blocks.tables, self.groups.strides
        for number in range(blocks.num_committed + 1, num_full + 1):
            block_hash = hashes[number]
            for group, stride in enumerate(strides):
                if number % stride:
                    continue
                block = tables[group][number // stride - 1]
                if block != NULL_BLOCK:
                    indexes[group].insert(block_hash, block)
                    offer((group, block_hash))
        blocks.num_committed = num_full
        if blocks.pending_hash is not None:
            self._pending_blocks.renew(blocks)

    def swap_out(self, sequences: Sequence[BlockTable], num_computed: Sequence[int]) -> list[tuple[int, int]] | None:
        """Move a request's sequences to the host pool. num_computed: tokens of each with KV to move. Returns (device
        block, host block) pairs to copy; None without room. The device blocks are free at once. Until `swap_in` the
        sequences may only be freed."""
        for blocks, position in zip(sequences, num_computed, strict=True):
            self._release_unneeded(blocks, position)
        copies = self.host.swap_out(sequences)
        if copies is None and self.connector.release_held():
            copies = self.host.swap_out(sequences)
        if copies is not None:
            for blocks in sequences:
                del self._live[id(blocks)]
                self._pending_blocks.drop(blocks)
        return copies

    def swap_in(self, sequences: Sequence[BlockTable]) -> list[tuple[int, int]]:
        """Bring a request back; the caller has checked `room_after_swap_in`. Returns (host block, device block) pairs
        to copy, without blocks whose content was still on the device. The first `cache_blocks` after the copies offers
        them to the prefix index."""
        copies = self.host.swap_in(sequences)
        for blocks in sequences:
            self._live[id(blocks)] = blocks
            self._pending_blocks.renew(blocks)
        return copies

    def room_after_swap_in(self, sequences: Sequence[BlockTable]) -> tuple[int, int]:
        """(allocatable blocks left after `swap_in`, which must not be negative; blocks that the request then holds)."""
        fresh, evictable, held = self.host.blocks_to_return(sequences)
        return self.pool.num_allocatable - fresh - evictable, held

    def footprint(self, sequences: Sequence[BlockTable]) -> Footprint:
        return self.host.footprint(sequences)

    def free(self, blocks: BlockTable) -> None:
        """Release all blocks, last first, also of swapped sequences."""
        if blocks in self.host:
            self.host.free(blocks)
            return
        del self._live[id(blocks)]
        self._pending_blocks.drop(blocks)
        self._release_all(blocks)

    @property
    def has_transfers(self) -> bool:
        """True if the KV connector has blocks to move or release, even without live requests."""
        return self.connector.has_work or self.transfer_blocks.is_holding

    @property
    def can_transfer(self) -> bool:
        """True if the KV connector has work, and its next transfer need not wait for an earlier one. The engine core
        then plans transfers alone."""
        return self.has_transfers and not self.awaits_transfers

    @property
    def knows_stored(self) -> bool:
        """True after the KV connector's scan of the blocks stored before the start. The engine core waits for it before
        the first request."""
        return self.connector.is_ready

    @property
    def awaits_transfers(self) -> bool:
        """True if a request, or the KV connector's next order, waits for a transfer's end."""
        return self.connector.must_wait or self.transfer_blocks.is_transferring

    def finish(self, request_id: str, seq_id: int, blocks: BlockTable, num_tokens: int) -> None:
        """Free a sequence that has ended by itself, with KV of `num_tokens` tokens. Blocks that the KV connector sends
        are held."""
        if self.connector.request_finished(request_id, seq_id, blocks, num_tokens):
            self.transfer_blocks.hold(seq_id, blocks.tables)
        self.free(blocks)

    def evict(self, chain: HashChain | None) -> None:
        """Remove a sequence's blocks, whose content may be invalid, from the prefix cache. Owners keep the blocks;
        registered prefixes stay."""
        for block_hash in () if chain is None else chain.hashes[1:]:
            for group, index in enumerate(self._indexes):
                block = index.find(block_hash)
                if block is not None and not self._registered.holds(block):
                    self.pool.forget(block)
                self.transfer_blocks.forget((group, block_hash))
                self.connector.forget((group, block_hash))

    def reset_prefix_cache(self) -> int:
        """Clear all cached content; blocks in use stay in use. Returns how many blocks were set free."""
        # Blocks that are being computed will still be committed, but never hit without the blocks before them.
        for blocks in self._live.values():
            self._pending_blocks.drop(blocks)
        self.transfer_blocks.reset()
        self.connector.reset()
        num_dropped = self.pool.drop_cached()
        for prefix in self._registered:
            self._enter(prefix.blocks)
        return num_dropped

    # -- registered prefixes
    # ----------------------------------------------------------------------------------------------------

    def register_prefix(self, name: str, blocks: BlockTable, token_ids: Sequence[int]) -> None:
        """Keep a sequence that has computed exactly `token_ids`, with full blocks committed, as a registered prefix."""
        num_tokens = len(token_ids)
        assert blocks.chain is not None
        assert name not in self._registered
        assert self.groups.fits(blocks.tables, num_tokens), "computed more than the prefix"
        del self._live[id(blocks)]
        self._pending_blocks.drop(blocks)
        num_full = num_tokens // self.hash_block_size
        # A sequence that shares only the full blocks must find all that its queries read.
        self._release_unneeded(blocks, num_tokens - num_tokens % self.groups.hit_size)
        self._enter(blocks)
        self._registered.insert(
            name, RegisteredPrefix(blocks, num_tokens, list(token_ids[num_full * self.hash_block_size :]))
        )

    def unregister_prefix(self, name: str) -> int:
        """Unregister a prefix; its full blocks stay cached. Returns how many blocks no longer belong to a registered
        prefix. Raises KeyError for an unknown name."""
        before = self.num_registered_blocks
        self._release_all(self._registered.remove(name).blocks)
        return before - self.num_registered_blocks

    def registered_prefixes(self) -> list[tuple[str, RegisteredPrefix]]:
        return self._registered.items()

    def is_registered(self, name: str) -> bool:
        return name in self._registered

    @property
    def num_registered_blocks(self) -> int:
        return self._registered.num_blocks

    @property
    def num_unregistered_blocks(self) -> int:
        return self.pool.num_usable - self._registered.num_blocks

    @property
    def num_registered_empty_slots(self) -> int:
        """Token slots that stay empty in registered prefixes' last blocks, over all groups; part of the waste that
        EngineStats reports."""
        return sum(
            [
                len(prefix.blocks.tables[group]) * size - prefix.num_tokens
                for prefix in self._registered
                for group, size in self.token_groups
            ]
        )

    @property
    def num_used_slots(self) -> int:
        """Number of token slots of used blocks: one per token that a block has room for; a block of states has one,
        always full."""
        return sum(map(mul, self.pool.num_used_of, self._slots_of_block))

    def num_always_shared(self, chain: HashChain, token_ids: Sequence[int]) -> int:
        """Number of blocks that a prompt never allocates, because it starts with a whole registered prefix. chain:
        new one."""
        if not self.enable_prefix_caching or not self._registered.num_blocks:
            return 0
        max_tokens = min(len(token_ids) - 1, self._registered.most_tokens)
        chain.extend(token_ids, max_tokens // self.hash_block_size)
        prefix = self._registered.longest(chain, token_ids, max_tokens)
        return 0 if prefix is None else self.groups.num_kept_blocks(prefix.num_tokens)

    # -- bounds and invariants --------------------------------------------------------------------------------------

    def most_blocks(self, num_tokens: int, max_chunk: int) -> int:
        return self.groups.most_blocks(num_tokens, max_chunk)

    def check(self) -> None:
        """Assert every invariant of tables, counts, lists and indexes. O(blocks)."""
        owners: dict[int, int] = {}
        for blocks in (*self._live.values(), *(prefix.blocks for prefix in self._registered)):
            assert len(blocks.tables) == self.num_groups
            assert self.groups.fits(blocks.tables, blocks.capacity), "table and capacity disagree"
            for table, first in zip(blocks.tables, blocks.first_held, strict=True):
                held = [block for block in table if block != NULL_BLOCK]
                assert not any(table[:first]), "a table names a block before its first"
                assert len(set(held)) == len(held), "a table names a block twice"
                for block in held:
                    owners[block] = owners.get(block, 0) + 1
        self.transfer_blocks.check(owners)
        self.pool.check(owners)
        host_owners: dict[int, int] = {}
        self.connector.check(host_owners)
        self.host.check(host_owners)
        for prefix in self._registered:
            assert prefix.blocks.chain is not None
            for index, table, stride in zip(self._indexes, prefix.blocks.tables, self.groups.strides, strict=True):
                for number, block in enumerate(table[: prefix.num_tokens // self.hash_block_size // stride]):
                    found = index.find(prefix.blocks.chain.block_hash((number + 1) * stride - 1))
                    assert block in (NULL_BLOCK, found), "a registered block is not the one that is found"
        for block_hash, blocks in self._pending_blocks.items():
            assert id(blocks) in self._live, "a pending block belongs to a sequence that ended"
            assert blocks.pending_hash == block_hash == self._pending_blocks.next_hash(blocks), (
                "a pending block is stale"
            )

    @property
    def num_live_sequences(self) -> int:
        return len(self._live)

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _hit_tables(self, chain: HashChain, num_tokens: int, token_ids: Sequence[int]) -> list[list[int]]:
        prefix = self._registered.longest(chain, token_ids, num_tokens, num_tokens) if token_ids else None
        if prefix is not None:
            return [
                [
                    NULL_BLOCK if index < manager.first_needed_block(num_tokens) else block
                    for index, block in enumerate(t)
                ]
                for manager, t in zip(self.groups.managers, prefix.blocks.tables, strict=True)
            ]
        assert num_tokens % self.groups.hit_size == 0, "a hit of a registered prefix needs the tokens"
        return self.groups.hit_tables(self._indexes, chain.hashes, num_tokens)

    def _enter(self, blocks: BlockTable) -> None:
        assert blocks.chain is not None
        for index, table, stride in zip(self._indexes, blocks.tables, self.groups.strides, strict=True):
            for number, block in enumerate(table[: blocks.num_committed // stride]):
                if block == NULL_BLOCK:
                    continue
                block_hash = blocks.chain.block_hash((number + 1) * stride - 1)
                index.insert(block_hash, block)
                found = index.find(block_hash)
                if found is not None and found != block:
                    self.pool.share(found)
                    self.pool.release(block)
                    table[number] = found

    def _release_all(self, blocks: BlockTable) -> None:
        for table in blocks.tables:
            for block in reversed(table):
                if block != NULL_BLOCK:
                    self.pool.release(block)
        blocks.tables = []

    def _release_unneeded(self, blocks: BlockTable, start: int, *, is_late: bool = False) -> None:
        """Release the blocks that no query from `start` on reads. is_late: keep those that started plans still fill."""
        for group in self._releasing:
            table, first_held = blocks.tables[group], blocks.first_held[group]
            first_needed = min(self.groups.managers[group].first_needed_block(start), len(table))
            if is_late and blocks.chain is not None:
                first_needed = min(first_needed, blocks.num_committed // self.groups.strides[group])
            if first_needed > first_held:
                for index in range(first_needed - 1, first_held - 1, -1):
                    if table[index] != NULL_BLOCK:
                        self.pool.release(table[index])
                        table[index] = NULL_BLOCK
                blocks.first_held[group] = first_needed
