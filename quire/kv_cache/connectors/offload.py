"""KV connector to host memory and disk (docs/decisions/0028-kv-connector.md). It decides on copies and owns their
blocks; the worker executes the plan's copies and file accesses, from disk first to the host.

Host blocks without an owner (a swapped sequence, a transfer or a deferred request) are evictable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.kv_cache.block_hash import HashChain
from quire.kv_cache.connectors.interface import KVConnector, Lookup, PendingLoad, Pools
from quire.kv_cache.connectors.transfer_blocks import DeviceLoad
from quire.kv_cache.stats import EngineStats
from quire.step import BlockKey, StoreReport, StoreTransfers

STORING_SHARE = 4
"""At most one host block in STORING_SHARE is being stored to disk."""
LOADING_SHARE = 2
"""At most one host block in LOADING_SHARE is loading or held for a deferred request."""

RETRY = 16
MAX_BACKLOG = 2**16
"""Limit of blocks waiting to be copied; the oldest are dropped."""


class Fetch:
    """Load of one deferred request's blocks from disk to the host pool."""

    __slots__ = ("_connector", "held", "num_loading", "wanted")

    def __init__(self, connector: OffloadConnector) -> None:
        self._connector = connector
        self.wanted: list[BlockKey] = []
        """Keys of blocks that no order to load names yet."""
        self.held: list[int] = []
        """Host blocks that this request keeps from eviction, those being loaded included."""
        self.num_loading = 0

    @property
    def is_pending(self) -> bool:
        return bool(self.wanted or self.num_loading)

    def release(self) -> None:
        self._connector.drop(self)


class TransferCounters:
    __slots__ = (
        "num_bytes",
        "num_disk_hits",
        "num_host_hits",
        "num_load_failures",
        "num_loaded",
        "num_store_failures",
        "num_stored",
    )

    def __init__(self) -> None:
        self.num_stored = self.num_store_failures = self.num_loaded = self.num_load_failures = 0
        self.num_host_hits = 0
        """Blocks copied from host memory to the device for a prefix hit."""
        self.num_disk_hits = 0
        """Number of those blocks that came from disk."""
        self.num_bytes = 0
        """Bytes in the directory now."""


class OffloadConnector(KVConnector):
    """KV connector to host memory and disk; it uses host blocks of the pool for swapped requests."""

    def __init__(self, pools: Pools) -> None:
        self._device, self._host, self._indexes, self._blocks = pools
        self._disk = DiskIndex(len(self._device))
        self._backlog: dict[BlockKey, None] = {}
        """Keys of cached blocks that wait to be copied to the host, oldest first."""
        self._storing: dict[int, BlockKey] = {}
        self._storing_keys: set[BlockKey] = set()
        self._loading: dict[int, BlockKey] = {}
        self._loading_to: dict[BlockKey, int] = {}
        self._void: set[BlockKey] = set()
        """Content removed from the cache during its transfer."""
        self._fetches: dict[Fetch, None] = {}
        self._waiters: dict[int, list[Fetch]] = {}
        """Host block that is being loaded -> fetches that wait for it."""
        self._from_disk: dict[int, BlockKey] = {}
        """Host block -> key, for blocks loaded from disk and not used since."""
        self._bringing: list[tuple[int, int]] = []
        """(host block, device block) copies that the plan being made orders."""
        self._load_seconds = self._token_seconds = 0.0
        self._num_declined = 0
        self._was_reset = False
        self.is_ready = False
        self.counters = TransferCounters()
        self._max_storing = max(1, self._host.num_usable // STORING_SHARE)
        self._max_loading = max(1, self._host.num_usable // LOADING_SHARE)

    @property
    def has_content(self) -> bool:
        return bool(self._disk) or any(self._indexes)

    @property
    def has_work(self) -> bool:
        # With all host blocks held by swapped requests there is nothing to order or wait for.
        return bool(self._backlog) and (bool(self._storing) or self._host.num_allocatable > 0)

    @property
    def must_wait(self) -> bool:
        if any(fetch.is_pending for fetch in self._fetches):
            return True
        is_full = len(self._storing) >= self._max_storing or not self._host.num_allocatable
        return bool(self._backlog and self._storing) and is_full

    @property
    def num_busy(self) -> int:
        """Number of host blocks that a transfer or a waiting request holds."""
        return len(self._wanted_blocks().union(self._storing))

    @property
    def num_loadable(self) -> int:
        """Maximum blocks that a fetch can bring from disk now."""
        held = len(self._wanted_blocks())
        wanted = sum(len(fetch.wanted) for fetch in self._fetches)
        return max(0, min(self._max_loading - held, self._host.num_allocatable) - wanted)

    # -- looking up -------------------------------------------------------------------------------------------------

    def lookup(
        self, chain: HashChain | None, num_cached_tokens: int, max_tokens: int, *, asynchronous: bool
    ) -> Lookup | None:
        if not self.has_content:
            return None
        if not asynchronous:
            return self._blocks.reach(chain, num_cached_tokens, max_tokens, self._is_on_host)
        while (found := self._blocks.reach(chain, num_cached_tokens, max_tokens, self._is_stored)) is not None:
            on_host: list[BlockKey] = []
            on_disk: list[BlockKey] = []
            for key in found.to_load:
                (on_host if self._blocks.is_arriving(key) or self._is_on_host(key) else on_disk).append(key)
            if not on_disk:
                return found
            excess = len(on_disk) - self.num_loadable
            if excess <= 0:
                num_tokens = found.num_blocks * self._blocks.hash_block_size - num_cached_tokens
                is_worthwhile = self._is_worthwhile(len(on_disk), num_tokens)
                return Lookup(found.num_blocks, [], [], [*on_host, *on_disk], True, is_worthwhile)
            max_tokens = (found.num_blocks - -(-excess // len(self._indexes))) * self._blocks.hash_block_size
        return None

    def find(self, key: BlockKey) -> int | None:
        return self._indexes[key[0]].find(key[1])

    def is_on_disk(self, key: BlockKey) -> bool:
        return key in self._disk

    def _is_on_host(self, key: BlockKey) -> bool:
        return self.find(key) is not None

    def _is_stored(self, key: BlockKey) -> bool:
        return self.is_on_disk(key) or self._is_on_host(key)

    # -- storing and loading -------------------------------------------------------------------------------------------

    def offer(self, key: BlockKey) -> None:
        if key not in self._disk:
            self._backlog[key] = None
            if len(self._backlog) > MAX_BACKLOG:
                del self._backlog[next(iter(self._backlog))]

    def reuse(self, group: int, hashes: Iterable[bytes]) -> None:
        for block_hash in hashes:
            self.offer((group, block_hash))

    def allocated(self, found: Lookup, load: DeviceLoad) -> PendingLoad:
        if found.is_asynchronous:
            return self.fetch(found.staged)
        for _, key, block in load.orders:
            self.bring(key, block)
        return load

    def bring(self, key: BlockKey, block: int) -> None:
        """Order the copy of a block that `find` knows to a device block. For `allocated`."""
        source = self.find(key)
        assert source is not None, "a hit was found and is gone"
        self._host.share(source)
        self._bringing.append((source, block))
        self.counters.num_host_hits += 1
        self.counters.num_disk_hits += self._from_disk.pop(source, None) == key

    def _is_worthwhile(self, num_disk_blocks: int, num_tokens: int) -> bool:
        """True if loading the blocks takes less time than computing the tokens."""
        loading, computing = num_disk_blocks * self._load_seconds, num_tokens * self._token_seconds
        if not computing or loading < computing:
            return True
        self._num_declined += 1
        return self._num_declined % RETRY == 0

    def fetch(self, keys: Sequence[BlockKey]) -> Fetch:
        """Bring blocks from disk to the host, and keep those already there from eviction, until `drop`."""
        fetch = Fetch(self)
        for key in keys:
            block = self.find(key)
            if block is None:
                fetch.wanted.append(key)
            else:
                self._host.share(block)
                fetch.held.append(block)
        self._fetches[fetch] = None
        return fetch

    def drop(self, fetch: Fetch) -> None:
        """End a fetch, as its request starts, ends or loses its host blocks. Blocks still being loaded stay cached."""
        if fetch not in self._fetches:
            return
        del self._fetches[fetch]
        fetch.wanted.clear()
        for block in fetch.held:
            if block in self._waiters:
                self._waiters[block].remove(fetch)
            self._host.release(block)
        fetch.held.clear()
        fetch.num_loading = 0

    def orders(self, *, may_allocate: bool) -> StoreTransfers | None:
        orders = StoreTransfers(swap_in=self._bringing)
        self._bringing = []
        if may_allocate:
            for fetch in self._fetches:
                self._order_loads(fetch, orders)
            self._order_stores(orders)
        for source, _ in orders.swap_in:
            self._host.release(source)
        return orders if orders.swap_in or orders.swap_out or orders.stores or orders.loads else None

    def _order_loads(self, fetch: Fetch, orders: StoreTransfers) -> None:
        for key in fetch.wanted:
            block = self.find(key)
            if block is None:
                block = self._loading_to.get(key)
                if block is None:
                    if key not in self._disk or not self._host.num_allocatable:
                        break  # the blocks behind it are of no use
                    block = self._host.allocate()
                    self._loading[block] = key
                    self._loading_to[key] = block
                    self._waiters[block] = []
                    orders.loads.append((*key, block))
                self._waiters[block].append(fetch)
                fetch.num_loading += 1
            self._host.share(block)
            fetch.held.append(block)
        fetch.wanted.clear()

    def _order_stores(self, orders: StoreTransfers) -> None:
        while self._backlog and len(self._storing) < self._max_storing:
            key = next(iter(self._backlog))
            block = self._device[key[0]].find(key[1])
            copy = self.find(key)
            if copy is None and block is not None and not self._host.num_allocatable:
                return
            del self._backlog[key]
            if key in self._disk or (copy is None and block is None) or key in self._storing_keys:
                continue  # evicted before its turn came, or there already
            if copy is not None:
                self._host.share(copy)
            else:
                assert block is not None
                copy = self._host.allocate()
                self._indexes[key[0]].insert(key[1], copy)
                orders.swap_out.append((block, copy))
            self._storing[copy] = key
            self._storing_keys.add(key)
            orders.stores.append((copy, *key))

    def update(self, report: StoreReport) -> None:
        self._count(report)
        self.is_ready |= not report.is_scanning
        self._load_seconds, self._token_seconds = report.load_seconds, report.token_seconds
        self._disk.remove(report.gone)
        for block in report.failed:
            self._disk.remove([self._loading[block]])
            self._void.discard(self._loading[block])
            self._end_load(block)
        for block in report.loaded:
            group, block_hash = key = self._loading[block]
            if key in self._void:
                self._void.remove(key)
            elif not self._was_reset or key in self._disk:
                self._indexes[group].insert(block_hash, block)
                self._from_disk[block] = key
            self._end_load(block)
        found = [key for key in report.found if not self._was_reset or key in self._storing_keys]
        self._disk.insert(key for key in found if key not in self._void)
        for block in report.released:
            key = self._storing.pop(block)
            self._storing_keys.discard(key)
            self._void.discard(key)
            self._host.release(block)

    def _end_load(self, block: int) -> None:
        del self._loading_to[self._loading.pop(block)]
        is_void = not any(block in index for index in self._indexes)
        for fetch in self._waiters.pop(block):
            fetch.num_loading -= 1
            if is_void:
                fetch.held.remove(block)
                self._host.release(block)
        self._host.release(block)

    def _wanted_blocks(self) -> set[int]:
        return {block for fetch in self._fetches for block in fetch.held}.union(self._loading)

    def _count(self, report: StoreReport) -> None:
        counters = self.counters
        counters.num_stored += report.num_stored
        counters.num_store_failures += report.num_store_failures
        counters.num_loaded += len(report.loaded)
        counters.num_load_failures += len(report.failed)
        counters.num_bytes = report.num_bytes

    def forget(self, key: BlockKey) -> None:
        """Drop a block's content from host and index (`KVConnector.forget`); its file is found at the next start."""
        self._backlog.pop(key, None)
        self._disk.remove([key])
        if key in self._storing_keys or key in self._loading_to:
            self._void.add(key)
        block = self.find(key)
        if block is not None:
            self._host.forget(block)

    def reset(self) -> None:
        """Drop the host's content and the index of files, which only a restart finds again. Called when the prefix
        cache is reset."""
        self._was_reset = True
        self._backlog.clear()
        self._storing_keys.clear()
        self._disk.clear()
        self._host.drop_cached()
        for fetch in list(self._fetches):
            self.drop(fetch)
        self._from_disk.clear()

    def release_held(self) -> bool:
        held = [fetch for fetch in self._fetches if fetch.held]
        for fetch in held:
            self.drop(fetch)
        return bool(held)

    # -- inspection -------------------------------------------------------------------------------------------------

    def report_stats(self, stats: EngineStats) -> None:
        counters = self.counters
        stats.num_used_host_blocks -= self.num_busy
        stats.num_offloaded_blocks = len(self._disk)
        stats.offload_bytes = counters.num_bytes
        stats.host_cache_hit_blocks_total = counters.num_host_hits - counters.num_disk_hits
        stats.disk_cache_hit_blocks_total = counters.num_disk_hits
        stats.offload_stored_blocks_total = counters.num_stored
        stats.offload_stored_bytes_total = counters.num_stored * stats.block_bytes
        stats.offload_store_failures_total = counters.num_store_failures
        stats.offload_loaded_blocks_total = counters.num_loaded
        stats.offload_loaded_bytes_total = counters.num_loaded * stats.block_bytes
        stats.offload_load_failures_total = counters.num_load_failures

    def check(self, owners: dict[int, int]) -> None:
        assert not self._bringing, "an order to swap in was left behind"
        assert self._loading_to == {key: block for block, key in self._loading.items()}
        assert self._waiters.keys() == self._loading.keys()
        for blocks in (self._storing, self._loading, *(fetch.held for fetch in self._fetches)):
            _count_in(blocks, owners)
        for fetch in self._fetches:
            assert fetch.num_loading == sum(block in self._loading for block in fetch.held)
            assert all(fetch in self._waiters[block] for block in fetch.held if block in self._loading)
        for block in self._loading:
            assert not any(block in index for index in self._indexes), "a block is found before its content is there"
        assert self._storing_keys <= set(self._storing.values())
        assert self._void <= set(self._storing.values()).union(self._loading_to), "what has ended is still void"


def _count_in(blocks: Iterable[int], owners: dict[int, int]) -> None:
    for block in blocks:
        owners[block] = owners.get(block, 0) + 1


class DiskIndex:
    """Hashes of the blocks on disk, per KV group, from the scan at the start and the worker's reports since."""

    def __init__(self, num_groups: int) -> None:
        self._hashes: tuple[set[bytes], ...] = tuple(set() for _ in range(num_groups))

    def __len__(self) -> int:
        return sum(map(len, self._hashes))

    def __bool__(self) -> bool:
        return any(self._hashes)

    def __contains__(self, key: BlockKey) -> bool:
        return key[1] in self._hashes[key[0]]

    def insert(self, keys: Iterable[BlockKey]) -> None:
        """Add blocks that the workers report as stored or found at the start. Keys of KV groups that the engine lacks
        (a foreign file) are ignored."""
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
