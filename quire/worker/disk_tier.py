"""The disk tier in a worker's step: loads start with a plan, stores after its copies; its result reports what ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch

from quire.step import DiskReport, StepPlan
from quire.worker.block_file import Buffer
from quire.worker.disk_store import DiskStore, smoothed
from quire.worker.kv_transfer import BlockTransfers

DISK_PATIENCE = 0.02
"""The longest time, in seconds, that a plan without tokens waits for transfers: it delays the next plan's new
requests."""
TIMED_TOKENS = 64
"""Steps of at least this many tokens are timed to estimate the seconds per token of a prompt."""
CLOSE_SECONDS = 3.0
"""The longest time that closing waits for stores that were ordered."""


class DiskTier(Protocol):
    """Loads and stores of KV blocks on disk. The thread that runs a plan calls both methods once for it."""

    def begin_transfers(self, plan: StepPlan) -> None:
        """Start the plan's loads. Call before the plan runs, and after the swapping of all plans before it."""
        ...

    def end_transfers(self, plan: StepPlan) -> DiskReport | None:
        """Start the plan's stores; return what ended since the last report. Call after the plan has run; its swapping
        may still be under way."""
        ...

    def close(self) -> None:
        """Finish what is being stored. Idempotent."""
        ...


class NoDiskTier:
    """The DiskTier of an engine that keeps no blocks on disk."""

    def begin_transfers(self, plan: StepPlan) -> None:
        orders = (plan.disk_stores, plan.disk_loads, plan.awaits_disk)
        assert not any(orders), "a plan stores or loads, and there is no disk tier"

    def end_transfers(self, plan: StepPlan) -> DiskReport | None:
        return None

    def close(self) -> None:
        """Nothing to close."""


class FileTier:
    """A DiskTier that keeps blocks in files, through a DiskStore."""

    def __init__(self, store: DiskStore, transfers: BlockTransfers) -> None:
        self._store = store
        self._transfers = transfers
        self._token_seconds = 0.0
        self._began = 0.0

    def begin_transfers(self, plan: StepPlan) -> None:
        self._began = time.perf_counter()
        if plan.disk_loads:
            self._transfers.synchronize()  # earlier swapping may still be reading the blocks that are loaded into
        for group, block_hash, host_block in plan.disk_loads:
            self._store.load_block(group, block_hash, host_block)

    def end_transfers(self, plan: StepPlan) -> DiskReport | None:
        if plan.total_tokens >= TIMED_TOKENS:
            seconds = (time.perf_counter() - self._began) / plan.total_tokens
            self._token_seconds = smoothed(self._token_seconds, seconds)
        if plan.disk_stores:
            self._transfers.synchronize()
            for host_block, group, block_hash in plan.disk_stores:
                self._store.store_block(host_block, group, block_hash)
        if plan.awaits_disk:
            self._store.wait(DISK_PATIENCE)
        report = self._store.take_report()
        if report is not None:
            report.token_seconds = self._token_seconds
        return report

    def close(self) -> None:
        self._store.close(CLOSE_SECONDS)


class HostBlocks:
    """Host memory for the DiskStore: a callable from a host block to its pages."""

    def __init__(self, pages: Sequence[torch.Tensor]) -> None:
        """pages[j]: [num_blocks, page bytes] uint8, on the CPU."""
        self._pages = [page.numpy() for page in pages]

    def __call__(self, block: int) -> list[Buffer]:
        return [memoryview(page[block]) for page in self._pages]
