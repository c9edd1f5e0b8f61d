"""Reading the transfers of a plan."""

from __future__ import annotations

from quire.step import StepPlan
from quire.transfers import HostTransfers, OffloadTransfers


def copies(plan: StepPlan) -> HostTransfers:
    """The copies between the pools; empty lists where the plan has none."""
    return plan.transfers or HostTransfers()


def disk_orders(plan: StepPlan) -> OffloadTransfers:
    """The orders of OffloadConnector; empty lists where the plan has none."""
    return plan.transfers if isinstance(plan.transfers, OffloadTransfers) else OffloadTransfers()
