"""The disk tier of a FakeExecutor: files that outlive it, transfers that take some plans, and what can go wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from quire.step import BlockKey, StepPlan, StoreReport
from tests.fakes.transfers import copies, disk_orders

Slots: TypeAlias = list[int | None]


@dataclass
class FakeDisk:
    """files: what is stored; give the same dictionary to another one to restart. delay: most plans that a transfer
    takes. fails: keys whose load fails. limit: most files; the oldest go. is_hung: nothing ends."""

    files: dict[BlockKey, Slots] = field(default_factory=dict)
    delay: int = 0
    seed: int = 0
    fails: Callable[[BlockKey], bool] = lambda _key: False
    limit: int = 10**9
    is_hung: bool = False
    load_seconds: float = 0.0
    token_seconds: float = 0.0
    num_loads: int = 0
    num_waits: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._report: StoreReport | None = StoreReport(found=list(self.files))
        self._storing: dict[int, tuple[int, BlockKey, Slots]] = {}
        self._loading: dict[int, tuple[int, BlockKey]] = {}
        self._num_plans = 0

    def run(self, plan: StepPlan, host: dict[int, Slots], device: dict[int, Slots]) -> StoreReport | None:
        """The transfers of one plan, behind its swaps. Returns what has ended."""
        self._check_left_alone(plan, host)
        self._num_plans += 1
        for block, group, block_hash in disk_orders(plan).stores:
            assert block in host, f"host block {block} is stored and was never written"
            assert block not in self._storing, f"host block {block} is stored twice at once"
            self._storing[block] = (self._due(), (group, block_hash), list(host[block]))
        for group, block_hash, block in disk_orders(plan).loads:
            assert block not in self._storing.keys() | self._loading.keys(), f"host block {block} is in use"
            self._loading[block] = (self._due(), (group, block_hash))
            host.pop(block, None)  # void until the end
        if copies(plan).awaits_report:
            self.num_waits += 1
            self._num_plans += self.delay
        if not self.is_hung:
            self._finish(host)
        report, self._report = self._report, None
        if report is not None:
            report.load_seconds, report.token_seconds = self.load_seconds, self.token_seconds
        return report

    def _due(self) -> int:
        return self._num_plans + self._random.randint(0, self.delay)

    def _check_left_alone(self, plan: StepPlan, host: dict[int, Slots]) -> None:
        for block, (_, key, content) in self._storing.items():
            assert host.get(block) == content, f"host block {block} changed while it was stored as {key}"
        used = {host_block for _, host_block in copies(plan).swap_out}
        used |= {host_block for host_block, _ in copies(plan).swap_in}
        assert not used & self._loading.keys(), (
            f"host blocks {used & self._loading.keys()} are used while they are loaded"
        )

    def _finish(self, host: dict[int, Slots]) -> None:
        report = self._report or StoreReport()
        for block, (due, key, content) in list(self._storing.items()):
            if due <= self._num_plans:
                del self._storing[block]
                assert self.files.setdefault(key, content) == content, f"two contents have the key {key}"
                report.num_stored += 1
                report.found.append(key)
                report.released.append(block)
        while len(self.files) > self.limit:
            oldest = next(iter(self.files))
            del self.files[oldest]
            report.gone.append(oldest)
            report.found = [key for key in report.found if key != oldest]
        for block, (due, key) in list(self._loading.items()):
            if due <= self._num_plans:
                del self._loading[block]
                if key in self.files and not self.fails(key):
                    host[block] = list(self.files[key])
                    report.loaded.append(block)
                    self.num_loads += 1
                else:
                    report.failed.append(block)
        if report.found or report.gone or report.released or report.loaded or report.failed:
            self._report = report
