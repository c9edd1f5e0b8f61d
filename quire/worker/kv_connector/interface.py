"""The worker's half of a KV connector: it moves blocks as the scheduler's half orders
(quire/kv_cache/connectors/interface.py), and reports what has ended."""

from __future__ import annotations

from collections.abc import Sequence

from quire.step import HostTransfers, StepPlan, TransferReport

PATIENCE = 0.02
"""The longest time, in seconds, that a plan without tokens waits for transfers: it delays the next plan's new
requests."""


class WorkerConnector:
    """Executes the orders of `StepPlan.transfers` that are of the connector's own type. The copies between the pools of
    device and host, which every type of orders has, are the runner's (quire/worker/kv_transfer.py).

    Each transfer must end after a bounded time, and be reported: as done or as failed. Until then the scheduler leaves
    its blocks alone. The thread that runs a plan calls the methods once for it, in the order below.
    """

    layers: Sequence[int] = ()
    """The layers for which `wait_layer` and `save_layer` are called, each time in this order; none costs nothing."""

    def begin_plan(self, plan: StepPlan) -> None:
        """The model of a plan is about to run, as a whole."""
        self.start_load(plan)
        for layer in self.layers:
            self.wait_layer(layer)

    def end_plan(self, plan: StepPlan) -> TransferReport | None:
        """The model of a plan has run, as a whole. Returns what its result reports."""
        for layer in self.layers:
            self.save_layer(layer)
        return self.finished(plan)

    def start_load(self, plan: StepPlan) -> None:
        """Start the plan's loads. Called before the plan runs, when the copies of all plans before it were started."""

    def wait_layer(self, layer: int) -> None:
        """Order what earlier plans have loaded of a layer before whatever this plan computes with it."""

    def save_layer(self, layer: int) -> None:
        """The plan's work on a layer is computed, or ordered before what the connector does next."""

    def finished(self, plan: StepPlan) -> TransferReport | None:
        """Start what follows the plan, such as stores; return what has ended since the last report. Waits for a report,
        up to PATIENCE, where the plan awaits one. Called after the plan has run; its copies may still be under way."""
        return None

    def close(self) -> None:
        """Finish what is being stored or sent, within a bounded time. Idempotent."""


class NoWorkerConnector(WorkerConnector):
    """The worker's half of an engine that keeps blocks in its own pools alone."""

    def begin_plan(self, plan: StepPlan) -> None:
        transfers = plan.transfers
        assert transfers is None or (type(transfers) is HostTransfers and not transfers.awaits_report), (
            "a plan orders transfers, and there is no KV connector"
        )

    def end_plan(self, plan: StepPlan) -> None:
        """There is nothing to report."""
