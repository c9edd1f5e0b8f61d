"""The scheduler's half of a KV connector: it knows which cached blocks are stored outside the device, orders their
transfers, and takes the reports of the worker's half (quire/worker/kv_connector/interface.py).

How a prefix is loaded: `lookup` says how far the connector can continue a hit; TransferBlocks allocates device blocks
for that; `allocated` tells the connector which ones to fill, and its next `orders` carry it to the workers. Meanwhile
the request waits (quire/scheduler/gates.py). When the blocks are there they enter the prefix index, and the
request starts with a plain prefix hit: the scheduler knows no other way to begin behind computed tokens.

How a finished request's blocks are sent: `request_finished` answers True, and they keep an owner until the connector
names the sequence in `TransferBlocks.end_send`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from quire.kv_cache.block_hash import HashChain
from quire.kv_cache.stats import EngineStats
from quire.step import BlockKey, TransferReport, Transfers

if TYPE_CHECKING:
    from quire.kv_cache.block_pool import BlockPool
    from quire.kv_cache.block_table import BlockTable
    from quire.kv_cache.connectors.transfer_blocks import DeviceLoad, TransferBlocks
    from quire.kv_cache.prefix_index import PrefixIndex


class Lookup(NamedTuple):
    """A prefix hit that continues in the KV connector."""

    num_blocks: int
    """Leading hash blocks of the prompt, those on the device included."""
    on_device: list[BlockKey]
    """Hits to be kept meanwhile."""
    to_load: list[BlockKey]
    """Blocks that get a device block each, into which they are loaded."""
    staged: Sequence[BlockKey] = ()
    """Blocks that only come nearer, without device blocks. The next lookup finds them."""
    is_asynchronous: bool = False
    """Whether the blocks arrive when a report says so. Otherwise they are there for the next plan."""
    is_worthwhile: bool = True
    """Whether loading takes less time than computing."""


class PendingLoad(Protocol):
    """What one deferred request waits for."""

    @property
    def is_pending(self) -> bool: ...

    def release(self) -> None:
        """The request goes on, or has ended. What still arrives is kept like other cached content."""
        ...


class KVConnector:
    """Used by one thread. Transfers that it has ordered end with a report each, success or failure, after a bounded
    time: the worker's half sees to that. What a subclass leaves out is as if nothing were stored."""

    is_ready: bool = True
    """Whether it has learned what was stored before the engine started."""

    @property
    def has_work(self) -> bool:
        """Whether there are transfers to order although nothing may be computed."""
        return False

    @property
    def must_wait(self) -> bool:
        """Whether a request, or the next order, waits for the end of a transfer that TransferBlocks does not know."""
        return False

    def lookup(
        self, chain: HashChain | None, num_cached_tokens: int, max_tokens: int, *, asynchronous: bool
    ) -> Lookup | None:
        """How far a hit of `num_cached_tokens`, as `match_prefix` returned it for the same `max_tokens`, goes with the
        connector's blocks. None where that is less than MIN_BLOCKS further. asynchronous: consider also what cannot be
        there for the next plan."""
        return None

    def allocated(self, found: Lookup, load: DeviceLoad) -> PendingLoad:
        """Load what a lookup of this pass found: `load.orders` names the device blocks. Returns what the request waits
        for, which is `load` unless blocks are staged."""
        raise AssertionError("nothing was found")

    def request_finished(self, request_id: str, seq_id: int, blocks: BlockTable, num_tokens: int) -> bool:
        """A sequence has ended by itself, and the keys and values of its first `num_tokens` tokens are in `blocks`.
        Returns whether the blocks must be held until `TransferBlocks.end_send(seq_id)`. Sequences that were aborted,
        ran out of time or failed are not offered."""
        return False

    def orders(self, *, may_allocate: bool) -> Transfers | None:
        """What the plan at hand orders, once per plan. may_allocate: host blocks may be taken; not in a plan with
        which swapped sequences return: it reads the host blocks that they freed, and where they left with the same
        plan, it writes them too."""
        return None

    def update(self, report: TransferReport) -> None:
        """Take what the worker's half reports."""
        raise AssertionError("a worker without a KV connector has nothing to report")

    def offer(self, key: BlockKey) -> None:
        """The device's prefix index took a block in: it may be copied."""

    def reuse(self, group: int, hashes: Iterable[bytes]) -> None:
        """Blocks were hit on the device: the connector may have dropped them as unused."""

    def forget(self, key: BlockKey) -> None:
        """Do not find this content again until it was computed anew."""

    def reset(self) -> None:
        """Forget all content."""

    def release_held(self) -> bool:
        """Release the host blocks held for deferred requests, because swapped requests need the memory; returns whether
        there were any."""
        return False

    def report_stats(self, stats: EngineStats) -> None:
        """Fill in what the connector holds and has moved; subtract its blocks from `num_used_host_blocks`."""

    def check(self, owners: dict[int, int]) -> None:
        """Add the connector's shares of host blocks to `owners` (block -> owners), and assert its invariants."""


class NoConnector(KVConnector):
    """Only the device caches blocks."""


class Pools(NamedTuple):
    """What a connector shares with the KV manager. indexes: what is on the device, per KV group. host, host_indexes:
    the blocks of host memory, which swapped requests take first, and what they hold. blocks: the device blocks that
    transfers own."""

    indexes: Sequence[PrefixIndex]
    host: BlockPool
    host_indexes: Sequence[PrefixIndex]
    blocks: TransferBlocks


ConnectorFactory: TypeAlias = Callable[[Pools], KVConnector]


def no_connector(pools: Pools) -> NoConnector:
    """The ConnectorFactory of an engine that keeps blocks on the device alone."""
    return NoConnector()
