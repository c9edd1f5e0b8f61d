"""Host blocks and disk index against a model of their owners: no block is reused while it is in use."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.kv_cache.block_pool import BlockPool
from quire.kv_cache.connectors.interface import Pools
from quire.kv_cache.connectors.offload import DiskIndex, Fetch, OffloadConnector
from quire.kv_cache.connectors.transfer_blocks import TransferBlocks
from quire.kv_cache.coordinator import Coordinator
from quire.kv_cache.layout import KVGroup
from quire.kv_cache.prefix_index import PrefixIndex
from quire.kv_cache.spec import AttentionSpec
from quire.step import BlockKey, StoreReport, StoreTransfers
from tests.machines import run_machine

NUM_GROUPS = 2
NUM_DEVICE_BLOCKS = 1000
KEYS = [(group, bytes([number]) * 32) for group in range(NUM_GROUPS) for number in range(8)]


class TiersMachine(RuleBasedStateMachine):
    """A worker that finishes transfers in any order, swapped requests that come and go, and content by key."""

    num_hits = 0

    @initialize(num_host_blocks=st.integers(1, 16), stored=st.sets(st.sampled_from(KEYS)))
    def start(self, num_host_blocks: int, stored: set[BlockKey]) -> None:
        self.device = [PrefixIndex(NUM_DEVICE_BLOCKS) for _ in range(NUM_GROUPS)]
        indexes = [PrefixIndex(num_host_blocks + 1) for _ in range(NUM_GROUPS)]
        self.host = BlockPool(num_host_blocks + 1, indexes)
        group = KVGroup(AttentionSpec(1, 8, 8, dtype_bytes=4), (0,), 4, 256)
        groups = Coordinator([group] * NUM_GROUPS)
        blocks = TransferBlocks(BlockPool(NUM_DEVICE_BLOCKS, self.device), self.device, groups)
        self.connector = OffloadConnector(Pools(self.device, self.host, indexes, blocks))
        self.files = set(stored)
        self.connector.update(StoreReport(found=sorted(stored)))
        self.content: dict[int, BlockKey | None] = {}
        """What the worker's host memory holds; None: something else, or half of it."""
        self.storing: dict[int, BlockKey] = {}
        self.loading: dict[int, BlockKey] = {}
        self.fetches: list[Fetch] = []
        self.swapped: list[int] = []
        self.doubted: set[BlockKey] = set()
        """Forgotten, and not computed since."""
        self.num_blocks = 100
        """Device blocks so far; none is used twice."""

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True, max_size=4))
    def commit(self, keys: list[BlockKey]) -> None:
        for key in keys:
            self.num_blocks += 1
            self.device[key[0]].insert(key[1], self.num_blocks)
            self.doubted.discard(key)
            self.connector.offer(key)

    @rule(key=st.sampled_from(KEYS))
    def evict(self, key: BlockKey) -> None:
        block = self.device[key[0]].find(key[1])
        if block is not None:
            self.device[key[0]].remove(block)

    @rule(key=st.sampled_from(KEYS))
    def forget(self, key: BlockKey) -> None:
        """As KVCacheManager.forget does."""
        self.evict(key)
        self.connector.forget(key)
        self.doubted.add(key)

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True, max_size=6))
    def fetch(self, keys: list[BlockKey]) -> None:
        wanted = [key for key in keys if self.connector.find(key) is not None or self.connector.is_on_disk(key)]
        missing = sum(self.connector.find(key) is None for key in wanted)
        if wanted and missing <= self.connector.num_loadable:
            self.fetches.append(self.connector.fetch(wanted))

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if self.fetches:
            self.connector.drop(self.fetches.pop(data.draw(st.integers(0, len(self.fetches) - 1))))

    @rule(count=st.integers(0, 3), may_allocate=st.sampled_from([True, True, False]), data=st.data())
    def plan(self, count: int, may_allocate: bool, data: st.DataObject) -> None:
        found = [key for key in KEYS if self.connector.find(key) is not None]
        wanted = data.draw(st.permutations(found))[:count]
        for number, key in enumerate(wanted):
            self.connector.bring(key, 300 + number)
        orders = self.connector.orders(may_allocate=may_allocate) or StoreTransfers()
        for device, host in orders.swap_out:
            assert host not in self.storing.keys() | self.loading.keys() | set(self.swapped)
            self.content[host] = next(key for key in KEYS if self.device[key[0]].find(key[1]) == device)
        assert [self.content.get(host) for host, _ in orders.swap_in] == wanted
        for host, group, block_hash in orders.stores:
            assert self.content.get(host) == (group, block_hash)
            assert host not in self.storing
            self.storing[host] = (group, block_hash)
        for group, block_hash, host in orders.loads:
            assert host not in self.storing.keys() | self.loading.keys() | set(self.swapped)
            assert host not in {source for source, _ in orders.swap_in}
            self.loading[host] = (group, block_hash)
            self.content[host] = None
        assert not (orders.stores or orders.loads) or may_allocate
        type(self).num_hits += len(wanted)

    @rule(data=st.data(), fails=st.booleans(), gone=st.sets(st.sampled_from(KEYS), max_size=2))
    def report(self, data: st.DataObject, fails: bool, gone: set[BlockKey]) -> None:
        report = StoreReport(gone=sorted(gone & self.files))
        self.files -= gone
        for host in [host for host in sorted(self.storing) if data.draw(st.integers(0, 3))]:
            key = self.storing.pop(host)
            assert self.content[host] == key, "it changed while it was stored"
            self.files.add(key)
            report.found.append(key)
            report.released.append(host)
        for host in [host for host in sorted(self.loading) if data.draw(st.integers(0, 3))]:
            key = self.loading.pop(host)
            if fails or key not in self.files:
                report.failed.append(host)
            else:
                self.content[host] = key
                report.loaded.append(host)
        self.connector.update(report)

    @rule(count=st.integers(1, 4))
    def swap_a_request_out(self, count: int) -> None:
        if self.host.num_allocatable < count:
            self.connector.release_held()
        for _ in range(min(count, self.host.num_allocatable)):
            block = self.host.allocate()
            assert block not in self.storing.keys() | self.loading.keys()
            self.content[block] = None
            self.swapped.append(block)

    @rule()
    def swap_all_in(self) -> None:
        while self.swapped:
            self.host.release(self.swapped.pop())

    @rule(chance=st.integers(0, 9))
    def reset(self, chance: int) -> None:
        if chance:
            return
        self.connector.reset()
        for key in KEYS:
            assert self.connector.find(key) is None
            assert not self.connector.is_on_disk(key)

    @invariant()
    def check(self) -> None:
        if hasattr(self, "connector"):
            owners = dict.fromkeys(self.swapped, 1)
            self.connector.check(owners)
            self.host.check(owners)
            for key in KEYS:
                block = self.connector.find(key)
                assert block is None or self.content[block] == key, "another content would be hit"
                assert key not in self.doubted or (block is None and not self.connector.is_on_disk(key)), (
                    "it was forgotten"
                )
            assert all(not fetch.is_pending for fetch in self.fetches if not (fetch.wanted or self.loading))

    def teardown(self) -> None:
        """When all transfers have ended and no request waits, no block has an owner."""
        if not hasattr(self, "connector"):
            return
        self.connector.update(StoreReport(released=sorted(self.storing), failed=sorted(self.loading)))
        for fetch in self.fetches:
            assert not fetch.num_loading
            self.connector.drop(fetch)
        self.swap_all_in()
        assert self.host.num_used == self.connector.num_busy == 0


def test_random_transfers() -> None:
    run_machine(TiersMachine, examples=25, steps=60)
    # Which rules hypothesis draws is chance; loads that fail have tests in tests/scheduler/test_connector_loads.py.
    assert TiersMachine.num_hits > 0


def test_a_disk_index_knows_only_its_own_groups() -> None:
    index = DiskIndex(2)
    index.insert([(0, b"a"), (1, b"a"), (7, b"a")])
    assert len(index) == 2
    assert (1, b"a") in index
    index.remove([(1, b"a"), (7, b"b")])
    assert (1, b"a") not in index
    assert index
    index.clear()
    assert not index
