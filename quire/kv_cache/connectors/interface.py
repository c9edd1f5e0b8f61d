"""Scheduler's half of a KV connector: it knows the cached blocks outside the device, orders their transfers, and
processes the worker's reports (docs/decisions/0028-kv-connector.md). `lookup` extends a prefix hit; TransferBlocks
allocates its device blocks; `allocated` names them; the next `orders` carry the load."""

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
    """Prefix hit that continues in the KV connector's store."""

    num_blocks: int
    """Leading hash blocks of the prompt, those on the device included."""
    on_device: list[BlockKey]
    """Blocks of the hit on the device, which must not be evicted until the load ends."""
    to_load: list[BlockKey]
    """Blocks to load, each into a device block of its own."""
    staged: Sequence[BlockKey] = ()
    """Blocks that are only fetched nearer, without device blocks, for the next lookup."""
    is_asynchronous: bool = False
    """True if blocks arrive with a later report, False: with the next plan."""
    is_worthwhile: bool = True
    """True if loading takes less time than computing."""


class PendingLoad(Protocol):
    """Block loads that one deferred request waits for; its gate asks whether they have ended."""

    @property
    def is_pending(self) -> bool: ...

    def release(self) -> None:
        """Stop waiting: the request continues or has ended. Blocks that still arrive stay cached."""
        ...


class KVConnector:
    """Base of KV connectors, used by one thread. Each ordered transfer ends with a report, of success or failure, after
    a bounded time. The defaults here store nothing."""

    is_ready: bool = True
    """False until what was stored before the start is scanned."""

    @property
    def has_work(self) -> bool:
        """True if there are transfers to order although nothing may be computed. The engine core then runs plans of
        transfers alone."""
        return False

    @property
    def must_wait(self) -> bool:
        """True if a request, or the next order, waits for a transfer of the connector alone (not of device blocks)."""
        return False

    def lookup(
        self, chain: HashChain | None, num_cached_tokens: int, max_tokens: int, *, asynchronous: bool
    ) -> Lookup | None:
        """Extension of a hit of `num_cached_tokens` (result of `match_prefix` for the same `max_tokens`) by the
        connector's blocks; None if these are fewer than MIN_BLOCKS. asynchronous: include blocks that cannot be there
        for the next plan."""
        return None

    def allocated(self, found: Lookup, load: DeviceLoad) -> PendingLoad:
        """Load a lookup's blocks into the device blocks in `load.orders`. Returns what the request waits for: `load`,
        unless blocks are staged."""
        raise AssertionError("nothing was found")

    def request_finished(self, request_id: str, seq_id: int, blocks: BlockTable, num_tokens: int) -> bool:
        """Offer a sequence that has ended by itself (not aborted, timed-out or failed), with the keys and values of
        its first `num_tokens` tokens in `blocks`. Returns True to hold the blocks until
        `TransferBlocks.end_send(seq_id)`."""
        return False

    def orders(self, *, may_allocate: bool) -> Transfers | None:
        """Orders for this plan (None: none); called once per plan. may_allocate: host blocks may be taken; False for a
        plan that swaps sequences in."""
        return None

    def update(self, report: TransferReport) -> None:
        """Process what the workers' connectors report with a step's result: ended loads, stores and sends."""
        raise AssertionError("a worker without a KV connector has nothing to report")

    def offer(self, key: BlockKey) -> None:
        """Note a block that entered the device's prefix index; the connector may copy it. Called as running sequences
        fill blocks."""

    def reuse(self, group: int, hashes: Iterable[bytes]) -> None:
        """Note blocks that a starting request found on the device, which the connector may have dropped as unused."""

    def forget(self, key: BlockKey) -> None:
        """Drop a block's content: `lookup` finds it only when it has been computed anew. Called when content is in
        doubt (NaN)."""

    def reset(self) -> None:
        """Clear all content."""

    def release_held(self) -> bool:
        """Release the host blocks held for deferred requests, because swapped requests need the memory. False: there
        were none."""
        return False

    def report_stats(self, stats: EngineStats) -> None:
        """Report contents and transfers; subtract the connector's blocks from `num_used_host_blocks`."""

    def check(self, owners: dict[int, int]) -> None:
        """Add the connector's shares of host blocks to `owners` (block -> owners), and assert its invariants."""


class NoConnector(KVConnector):
    """Connector of engines that cache blocks on the device only."""


class Pools(NamedTuple):
    """Parts of the KV manager for a connector. indexes: prefix indexes of the device, per KV group. host, host_indexes:
    host blocks, which swapped requests take first, and the indexes of their contents. blocks: device blocks that
    transfers own."""

    indexes: Sequence[PrefixIndex]
    host: BlockPool
    host_indexes: Sequence[PrefixIndex]
    blocks: TransferBlocks


ConnectorFactory: TypeAlias = Callable[[Pools], KVConnector]


def no_connector(pools: Pools) -> NoConnector:
    return NoConnector()
