"""The disk tier in a worker's step: loads begin with a plan, stores behind its copies; its result tells what ended."""

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
"""Seconds that a plan which computes nothing waits for the end of a transfer: at most so late are new requests seen."""
TIMED_TOKENS = 64
"""A step of so many tokens tells what the tokens of a prompt take."""
CLOSE_SECONDS = 3.0
"""At the end, what is on its way to disk gets so much time."""


class DiskTier(Protocol):
    """Called once each for every plan, by the thread that runs it."""

    def begin_transfers(self, plan: StepPlan) -> None:
        """Before the plan, and after all swapping of the plans before."""
        ...

    def end_transfers(self, plan: StepPlan) -> DiskReport | None:
        """After the plan, whose swapping may still go on."""
        ...

    def close(self) -> None:
        """Finish what is being stored. Idempotent."""
        ...


class NoDiskTier:
    """Nothing is kept on disk."""

    def begin_transfers(self, plan: StepPlan) -> None:
        orders = (plan.disk_stores, plan.disk_loads, plan.awaits_disk)
        assert not any(orders), "a plan stores or loads, and there is no disk tier"

    def end_transfers(self, plan: StepPlan) -> DiskReport | None:
        return None

    def close(self) -> None:
        """Nothing is on its way."""


class FileTier:
    """Blocks in files."""

    def __init__(self, store: DiskStore, transfers: BlockTransfers) -> None:
        self._store = store
        self._transfers = transfers
        self._token_seconds = 0.0
        self._began = 0.0

    def begin_transfers(self, plan: StepPlan) -> None:
        self._began = time.perf_counter()
        if plan.disk_loads:
            self._transfers.synchronize()  # the blocks that are loaded into may have been on their way to the device
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
    """Host memory as the store sees it: block -> its pages."""

    def __init__(self, pages: Sequence[torch.Tensor]) -> None:
        """pages[j]: [num_blocks, page bytes] uint8, on the CPU."""
        self._pages = [page.numpy() for page in pages]

    def __call__(self, block: int) -> list[Buffer]:
        return [memoryview(page[block]) for page in self._pages]
