from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from quire.config.engine import EngineConfig
from quire.kv_cache.layout import KVCacheLayout
from quire.step import StepPlan, StoreReport, StoreTransfers
from quire.worker.kv_connector.block_file import BlockFileLayout, Buffer
from quire.worker.kv_connector.cache_identity import cache_namespace
from quire.worker.kv_connector.disk_store import DiskStore, smoothed
from quire.worker.kv_connector.interface import PATIENCE, WorkerConnector
from quire.worker.kv_transfer import BlockTransfers

TIMED_TOKENS = 64
"""Minimum tokens of a step timed to estimate the seconds per prompt token."""
CLOSE_SECONDS = 3.0
"""Maximum seconds that closing waits for stores."""


class OffloadWorker(WorkerConnector):
    """Keeps blocks in files through a DiskStore. Loaded blocks reach the device with a later plan's copies."""

    def __init__(self, store: DiskStore, transfers: BlockTransfers) -> None:
        self._store = store
        self._transfers = transfers
        self._token_seconds = 0.0
        self._began = 0.0

    def start_load(self, plan: StepPlan) -> None:
        self._began = time.perf_counter()
        orders = plan.transfers
        if isinstance(orders, StoreTransfers) and orders.loads:
            self._transfers.synchronize()  # earlier copies may still read the blocks to be overwritten
            for group, block_hash, host_block in orders.loads:
                self._store.load_block(group, block_hash, host_block)

    def finished(self, plan: StepPlan) -> StoreReport | None:
        if plan.total_tokens >= TIMED_TOKENS:
            seconds = (time.perf_counter() - self._began) / plan.total_tokens
            self._token_seconds = smoothed(self._token_seconds, seconds)
        orders = plan.transfers
        if isinstance(orders, StoreTransfers) and orders.stores:
            self._transfers.synchronize()
            for host_block, group, block_hash in orders.stores:
                self._store.store_block(host_block, group, block_hash)
        if orders is not None and orders.awaits_report:
            self._store.wait(PATIENCE)
        report = self._store.take_report()
        if report is not None:
            report.token_seconds = self._token_seconds
        return report

    def close(self) -> None:
        self._store.close(CLOSE_SECONDS)


def offload_worker(
    config: EngineConfig,
    layout: KVCacheLayout,
    code: dict[str, str],
    pages: Sequence[torch.Tensor],
    transfers: BlockTransfers,
) -> OffloadWorker:
    """Open the directory of `config.cache`. code: identity of the computing code (cache_identity.py). pages: tensors of
    the host pool, as for HostBlocks. Raises ConfigError if nothing can be stored."""
    directory = config.cache.offload_dir
    assert directory is not None, "no directory is configured"
    draft = config.speculation.draft
    namespace = cache_namespace(config.model, config.load, config.device, layout, code, draft)
    files = BlockFileLayout(namespace, layout.layers_per_group, layout.block_bytes // layout.layers_per_group)
    return OffloadWorker(DiskStore(directory, config.cache.offload_size, files, HostBlocks(pages)), transfers)


class HostBlocks:
    """Host memory for the DiskStore: called with a host block's number, it returns the block's pages."""

    def __init__(self, pages: Sequence[torch.Tensor]) -> None:
        """pages[j]: [num_blocks, page bytes] uint8, on the CPU."""
        self._pages = [page.numpy() for page in pages]

    def __call__(self, block: int) -> list[Buffer]:
        return [memoryview(page[block]) for page in self._pages]
