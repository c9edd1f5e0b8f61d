"""Device blocks owned by transfers of the KV connector, and the extension of prefix hits by stored blocks. A load owns
its block until it ends. A loaded block enters the prefix index and is kept for the next pass, in which its request
starts with a plain hit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from quire.kv_cache.block_hash import HashChain
from quire.kv_cache.block_pool import BlockPool
from quire.kv_cache.connectors.interface import Lookup
from quire.kv_cache.coordinator import Coordinator
from quire.kv_cache.layout import NULL_BLOCK
from quire.kv_cache.prefix_index import PrefixIndex
from quire.step import BlockKey

MIN_BLOCKS = 2
"""Least number of blocks for which a load begins."""


class DeviceLoad:
    """Blocks that one request loads to the device, and the hits that it keeps meanwhile. Made by
    `TransferBlocks.allocate`."""

    __slots__ = ("_owner", "hits", "numbers", "orders")

    def __init__(self, owner: TransferBlocks) -> None:
        self._owner = owner
        self.hits: list[int] = []
        self.numbers: set[int] = set()
        """Numbers of the loads that the request waits for, those of other requests included."""
        self.orders: list[tuple[int, BlockKey, int]] = []
        """(number of the load, content, device block): loads for the connector to order."""

    @property
    def is_pending(self) -> bool:
        return bool(self.numbers)

    def release(self) -> None:
        self._owner.stop_waiting(self)


class _Arrival:
    __slots__ = ("block", "is_void", "key", "waiters")

    def __init__(self, key: BlockKey, block: int) -> None:
        self.key = key
        self.block = block
        self.waiters: list[DeviceLoad] = []
        self.is_void = False
        """True if its content was removed from the cache meanwhile."""


class TransferBlocks:
    """Scheduler's half of the bookkeeping that all KV connectors share: owns blocks while a transfer reads or fills
    them. Uses the pool, prefix indexes (one per KV group) and coordinator of the KV manager."""

    def __init__(self, pool: BlockPool, indexes: Sequence[PrefixIndex], groups: Coordinator) -> None:
        self._pool = pool
        self._indexes = indexes
        self._groups = groups
        self.hash_block_size = groups.hash_block_size
        self._numbers = itertools.count()
        self._arrivals: dict[int, _Arrival] = {}
        self._arriving: dict[BlockKey, int] = {}
        """Content that can be waited for -> number of its load."""
        self._in_this_plan: list[int] = []
        """Numbers of the loads that end with the plan being made."""
        self._waiting: dict[DeviceLoad, None] = {}
        self._held: list[int] = []
        """Blocks that requests own through this pass and the next, one entry per share."""
        self._due: list[int] = []
        """Shares from the pass before, released at this one's end."""
        self._sending: dict[int, list[int]] = {}
        """Ended sequence -> its blocks, owned until the connector has sent them."""

    # -- loading ----------------------------------------------------------------------------------------------------

    def reach(
        self,
        chain: HashChain | None,
        num_cached_tokens: int,
        max_tokens: int,
        is_stored: Callable[[BlockKey], bool],
    ) -> Lookup | None:
        """Hit that loading all stored or arriving blocks would give; None if it is less than MIN_BLOCKS longer.
        num_cached_tokens: result of `match_prefix` for at least `max_tokens`. In tokens."""
        if chain is None:
            return None
        size = self.hash_block_size
        least, limit = num_cached_tokens + MIN_BLOCKS * size, max_tokens - max_tokens % size
        if limit < least:
            return None
        views = [_View(self, group, is_stored) for group in range(len(self._indexes))]
        num_tokens = self._groups.agreed_hit(views, chain.hashes, limit)
        if num_tokens < least:
            return None
        found = Lookup(num_tokens // size, [], [])
        groups = zip(self._groups.managers, self._groups.strides, self._indexes, strict=True)
        for group, (manager, stride, index) in enumerate(groups):
            for number in range(manager.first_needed_block(num_tokens), num_tokens // manager.block_size):
                key = (group, chain.block_hash((number + 1) * stride - 1))
                (found.to_load if index.find(key[1]) is None else found.on_device).append(key)
        return found

    def is_arriving(self, key: BlockKey) -> bool:
        return key in self._arriving

    def num_taken(self, found: Lookup) -> int:
        """Number of allocatable blocks that `allocate` takes for a lookup: hits without an owner, and blocks to
        load."""
        hits = (self._indexes[group].find(block_hash) for group, block_hash in found.on_device)
        num_evictable = sum(block is not None and self._pool.is_evictable(block) for block in hits)
        return num_evictable + sum(key not in self._arriving for key in found.to_load)

    def allocate(self, found: Lookup) -> DeviceLoad:
        """Own a lookup's hits, and allocate the blocks to load that are not arriving yet. The caller has checked the
        room (`num_taken`)."""
        load = DeviceLoad(self)
        for group, block_hash in found.on_device:  # all of them before one is allocated, which could evict them
            block = self._indexes[group].find(block_hash)
            assert block is not None, "a hit was found and is gone"
            self._pool.share(block)
            load.hits.append(block)
        for key in found.to_load:
            number = self._arriving.get(key)
            if number is None:
                number = self._arriving[key] = next(self._numbers)
                self._arrivals[number] = _Arrival(key, self._pool.allocate(key[0]))
                load.orders.append((number, key, self._arrivals[number].block))
                if not found.is_asynchronous:
                    self._in_this_plan.append(number)
            self._arrivals[number].waiters.append(load)
            load.numbers.add(number)
        if load.numbers:
            self._waiting[load] = None
        return load

    def end_load(self, number: int, *, is_loaded: bool) -> None:
        """End the load `number` of one block. is_loaded: the block holds the requested content (else the load
        failed). Ended loads are ignored."""
        arrival = self._arrivals.pop(number, None)
        if arrival is None:
            return
        group, block_hash = arrival.key
        if self._arriving.get(arrival.key) == number:
            del self._arriving[arrival.key]
        if is_loaded and not arrival.is_void:
            self._indexes[group].insert(block_hash, arrival.block)
            self._held.append(arrival.block)
        else:
            self._pool.release(arrival.block)
        for load in arrival.waiters:
            load.numbers.discard(number)
            if not load.numbers:
                self._keep_hits(load)

    def stop_waiting(self, load: DeviceLoad) -> None:
        """Note that a load's request continues or has ended; blocks still arriving stay cached."""
        for number in load.numbers:
            self._arrivals[number].waiters.remove(load)
        load.numbers.clear()
        self._keep_hits(load)

    def _keep_hits(self, load: DeviceLoad) -> None:
        if load in self._waiting:
            del self._waiting[load]
            self._held += load.hits
            load.hits = []

    def begin_pass(self) -> None:
        """Begin a pass of the scheduler: the copies of the plan before are done."""
        if self._in_this_plan:
            for number in self._in_this_plan:
                self.end_load(number, is_loaded=True)
            self._in_this_plan.clear()
        if self._held:
            self._due += self._held
            self._held = []

    def release(self) -> bool:
        """Release blocks loaded for requests before this pass; requests that started own them already. Returns False if
        there were none. Called each pass, and when blocks run short."""
        if not self._due:
            return False
        for block in reversed(self._due):
            self._pool.release(block)
        self._due = []
        return True

    def forget(self, key: BlockKey) -> None:
        """Keep this content out of the prefix index when it arrives. Called when it is in doubt."""
        number = self._arriving.pop(key, None)
        if number is not None:
            self._arrivals[number].is_void = True

    def reset(self) -> None:
        """`forget` all arriving content, and end the requests' waits. Transfers keep their blocks until they end."""
        for load in list(self._waiting):
            self.stop_waiting(load)
        for key in list(self._arriving):
            self.forget(key)

    # -- sending ----------------------------------------------------------------------------------------------------

    def hold(self, seq_id: int, tables: Iterable[Sequence[int]]) -> None:
        assert seq_id not in self._sending, "a sequence ends twice"
        self._sending[seq_id] = [block for table in tables for block in table if block != NULL_BLOCK]
        for block in self._sending[seq_id]:
            self._pool.share(block)

    def end_send(self, seq_id: int) -> None:
        """Release a sequence's blocks, which were sent or cannot be. Repetitions are ignored."""
        for block in reversed(self._sending.pop(seq_id, ())):
            self._pool.release(block)

    # -- inspection -------------------------------------------------------------------------------------------------

    @property
    def is_holding(self) -> bool:
        """True if transfers own blocks, or did until this pass."""
        return bool(self._held or self._due or self._arrivals or self._sending)

    @property
    def is_transferring(self) -> bool:
        """True if transfers have been ordered whose report has not come."""
        return bool(self._sending) or len(self._arrivals) > len(self._in_this_plan)

    def check(self, owners: dict[int, int]) -> None:
        arriving = [arrival.block for arrival in self._arrivals.values()]
        hits = [block for load in self._waiting for block in load.hits]
        for block in itertools.chain(self._held, self._due, arriving, hits, *self._sending.values()):
            owners[block] = owners.get(block, 0) + 1
        assert len(set(arriving)) == len(arriving), "two loads fill one block"
        for block in arriving:
            assert not any(block in index for index in self._indexes), "a block is found before its content is there"
        for key, number in self._arriving.items():
            assert self._arrivals[number].key == key
            assert not self._arrivals[number].is_void, "what was forgotten can be waited for"
        for load in self._waiting:
            assert load.numbers, "a request waits for nothing"
            assert all(load in self._arrivals[number].waiters for number in load.numbers)


class _View:
    """Contents of a KV group on the device and elsewhere, as a prefix index for `agreed_hit`. Made for one `reach`."""

    def __init__(self, blocks: TransferBlocks, group: int, is_stored: Callable[[BlockKey], bool]) -> None:
        self._blocks = blocks
        self._group = group
        self._is_stored = is_stored

    def find(self, block_hash: bytes) -> int | None:
        block = self._blocks._indexes[self._group].find(block_hash)
        key = (self._group, block_hash)
        if block is None and (self._blocks.is_arriving(key) or self._is_stored(key)):
            return NULL_BLOCK
        return block
