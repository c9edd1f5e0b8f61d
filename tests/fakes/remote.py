"""A KV connector to a remote store, both halves, over the numbers of a FakeExecutor: a network that takes time, loses
what it carries, changes the order, fails for some blocks of a load and not for others, and reports twice."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from quire.config.engine import EngineConfig
from quire.kv_cache.block_hash import HashChain
from quire.kv_cache.block_table import BlockTable
from quire.kv_cache.connectors.interface import KVConnector, Lookup, Pools
from quire.kv_cache.connectors.transfer_blocks import DeviceLoad
from quire.kv_cache.layout import NULL_BLOCK, KVCacheLayout
from quire.kv_cache.manager import KVCacheManager
from quire.scheduler.preemption import PreemptionCosts
from quire.scheduler.scheduler import Scheduler
from quire.step import BlockKey, HostTransfers, StepPlan

Slots: TypeAlias = list[int | None]


class RemoteTransfers(HostTransfers, tag="remote", array_like=True):
    loads: list[tuple[int, BlockKey, int]] = msgspec.field(default_factory=list)
    """(number of the load, content, device block)"""
    sends: list[tuple[int, list[tuple[BlockKey | None, int]]]] = msgspec.field(default_factory=list)
    """(sequence, [(content, device block)]); None: a block that is not full."""


class RemoteReport(msgspec.Struct, tag="remote", array_like=True):
    loaded: list[int] = []
    failed: list[int] = []
    sent: list[int] = []
    stored: list[BlockKey] = []


class RemoteConnector(KVConnector):
    """The scheduler's half: it loads asynchronously, straight into device blocks, and sends what a request computed."""

    def __init__(self, pools: Pools, *, sends: bool) -> None:
        self._blocks = pools.blocks
        self._strides = pools.blocks._groups.strides
        self._sends = sends
        self._known: set[BlockKey] = set()
        self._doubted: set[BlockKey] = set()
        """Forgotten, and not computed since."""
        self._orders = RemoteTransfers()
        self.is_ready = False

    @property
    def has_work(self) -> bool:
        return bool(self._orders.loads or self._orders.sends)

    def lookup(
        self, chain: HashChain | None, num_cached_tokens: int, max_tokens: int, *, asynchronous: bool
    ) -> Lookup | None:
        if not asynchronous:
            return None
        found = self._blocks.reach(chain, num_cached_tokens, max_tokens, self._known.__contains__)
        return None if found is None else found._replace(is_asynchronous=True)

    def allocated(self, found: Lookup, load: DeviceLoad) -> DeviceLoad:
        self._orders.loads += load.orders
        return load

    def request_finished(self, request_id: str, seq_id: int, blocks: BlockTable, num_tokens: int) -> bool:
        chain = blocks.chain
        if chain is None or not self._sends:
            return False
        num_hashed = min(num_tokens // self._blocks.hash_block_size, len(chain.hashes) - 1)
        content: list[tuple[BlockKey | None, int]] = []
        for group, (stride, table) in enumerate(zip(self._strides, blocks.tables, strict=True)):
            for number, block in enumerate(table):
                if block != NULL_BLOCK:
                    last = (number + 1) * stride - 1
                    content.append(((group, chain.block_hash(last)) if last < num_hashed else None, block))
        self._orders.sends.append((seq_id, content))
        return True

    def orders(self, *, may_allocate: bool) -> RemoteTransfers | None:
        if not self.has_work:
            return None
        orders, self._orders = self._orders, RemoteTransfers()
        return orders

    def update(self, report: RemoteReport) -> None:  # type: ignore[override]
        self.is_ready = True
        for number in report.loaded:
            self._blocks.end_load(number, is_loaded=True)
        for number in report.failed:
            self._blocks.end_load(number, is_loaded=False)
        for seq_id in report.sent:
            self._blocks.end_send(seq_id)
        self._known |= set(report.stored) - self._doubted

    def offer(self, key: BlockKey) -> None:
        self._doubted.discard(key)

    def forget(self, key: BlockKey) -> None:
        self._known.discard(key)
        self._doubted.add(key)

    def reset(self) -> None:
        self._known.clear()


@dataclass
class _Transfer:
    due: int
    is_lost: bool


@dataclass
class _Load(_Transfer):
    key: BlockKey
    block: int


@dataclass
class _Send(_Transfer):
    content: list[tuple[BlockKey | None, int, Slots]]


@dataclass
class FakeRemote:
    """The worker's half, and the store behind it. files: what is stored. delay: most plans that a transfer takes.
    lost: share of transfers of which the worker hears nothing until its own time limit, `timeout` plans. fails: share
    of the blocks whose load fails. repeats: share of ends that are reported again, in any later report. is_hung:
    nothing ends, not even by the time limit."""

    files: dict[BlockKey, Slots] = field(default_factory=dict)
    delay: int = 0
    seed: int = 0
    lost: float = 0.0
    fails: float = 0.0
    repeats: float = 0.0
    timeout: int = 12
    is_hung: bool = False
    num_plans: int = 0
    num_waits: int = 0
    num_loads: int = 0
    num_sends: int = 0
    num_failures: int = 0
    num_repeats: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._loads: dict[int, _Load] = {}
        self._sends: dict[int, _Send] = {}
        self._ended: list[tuple[str, int]] = []
        """(column of the report, number) of the ends that are reported again."""
        self._has_told = False

    def run(self, plan: StepPlan, host: dict[int, Slots], device: dict[int, Slots]) -> RemoteReport | None:
        """The transfers of one plan, behind its copies and its model. Returns what has ended."""
        self.num_plans += 1
        orders = plan.transfers
        if isinstance(orders, RemoteTransfers):
            for number, key, block in orders.loads:
                assert block not in {load.block for load in self._loads.values()}, f"block {block} is loaded twice"
                assert number not in self._loads, f"load {number} is ordered twice"
                self._loads[number] = _Load(*self._draw(), key, block)
                device[block] = [-1 - number]  # no token has such a number
            for seq_id, content in orders.sends:
                assert seq_id not in self._sends, f"sequence {seq_id} is sent twice"
                copies = [(key, block, list(device[block])) for key, block in content if block in device]
                self._sends[seq_id] = _Send(*self._draw(), copies)
        if orders is not None and orders.awaits_report:
            self.num_waits += 1
            self.num_plans += self.delay
        self._check_left_alone(device)
        return None if self.is_hung else self._finish(device)

    def _draw(self) -> tuple[int, bool]:
        is_lost = self._random.random() < self.lost
        return self.num_plans + (self.timeout if is_lost else self._random.randint(0, self.delay)), is_lost

    def _check_left_alone(self, device: dict[int, Slots]) -> None:
        for number, load in self._loads.items():
            assert device[load.block] == [-1 - number], f"block {load.block} was written while it was being loaded"
        for seq_id, send in self._sends.items():
            for _, block, content in send.content:
                assert device[block] == content, f"block {block} changed while sequence {seq_id} was being sent"

    def _finish(self, device: dict[int, Slots]) -> RemoteReport | None:
        report = RemoteReport()
        if not self._has_told:
            self._has_told = True
            report.stored += self.files
        if self._ended and self._random.random() < 0.5:
            column, number = self._ended.pop(self._random.randrange(len(self._ended)))
            getattr(report, column).append(number)
            self.num_repeats += 1
        for number in self._due(self._loads):
            load = self._loads.pop(number)
            is_loaded = not load.is_lost and load.key in self.files and self._random.random() >= self.fails
            if is_loaded:
                device[load.block] = list(self.files[load.key])
                self.num_loads += 1
            else:
                del device[load.block]
                self.num_failures += 1
            (report.loaded if is_loaded else report.failed).append(number)
            self._remember("loaded" if self._random.random() < 0.5 else "failed", number)
        for seq_id in self._due(self._sends):
            send = self._sends.pop(seq_id)
            for key, _, content in send.content:
                if key is not None and not send.is_lost:
                    assert self.files.setdefault(key, content) == content, f"two contents have the key {key}"
                    report.stored.append(key)
            report.sent.append(seq_id)
            self._remember("sent", seq_id)
            self.num_sends += not send.is_lost
        return report if report != RemoteReport() else None

    def _due(self, transfers: dict[int, _Load] | dict[int, _Send]) -> list[int]:
        """Those that end now, in any order."""
        due = [number for number, transfer in transfers.items() if transfer.due <= self.num_plans]
        self._random.shuffle(due)
        return due

    def _remember(self, column: str, number: int) -> None:
        if self._random.random() < self.repeats:
            self._ended.append((column, number))


def remote_scheduler(*, sends: bool = True):  # type: ignore[no-untyped-def]
    """A SchedulerFactory."""

    def make(config: EngineConfig, layout: KVCacheLayout, costs: PreemptionCosts | None) -> Scheduler:
        kv = KVCacheManager(
            layout,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            make_connector=lambda pools: RemoteConnector(pools, sends=sends),
        )
        return Scheduler(config.scheduler, kv, costs)

    return make
