"""Reading the transfers of a plan, and who makes those of a KV connector."""

from __future__ import annotations

from typing import Protocol

from quire.step import HostTransfers, StepPlan, StoreTransfers, TransferReport


def copies(plan: StepPlan) -> HostTransfers:
    """The copies between the pools; empty lists where the plan has none."""
    return plan.transfers or HostTransfers()


def disk_orders(plan: StepPlan) -> StoreTransfers:
    """The orders of OffloadConnector; empty lists where the plan has none."""
    return plan.transfers if isinstance(plan.transfers, StoreTransfers) else StoreTransfers()


class FakeWorkerConnector(Protocol):
    """The worker's half of a KV connector over the executor's numbers."""

    def run(
        self, plan: StepPlan, host: dict[int, list[int | None]], device: dict[int, list[int | None]]
    ) -> TransferReport | None:
        """The transfers of one plan, behind its copies and its model. Returns what has ended."""
        ...
