"""Worker's half of a KV connector (quire/kv_cache/connectors/interface.py)."""

from __future__ import annotations

from collections.abc import Sequence

from quire.step import HostTransfers, StepPlan, TransferReport

PATIENCE = 0.02
"""Maximum seconds that a plan without tokens waits for transfers."""


class WorkerConnector:
    """Executes the connector's own orders in `StepPlan.transfers`. The runner copies between device and host pools
    (quire/worker/kv_transfer.py). The plan's thread calls the methods once per plan, in the order below."""

    layers: Sequence[int] = ()
    """Layers for which `wait_layer` and `save_layer` are called, in order."""

    def begin_plan(self, plan: StepPlan) -> None:
        """Start the plan's loads and wait where its layers need them. Worker calls it before the model runs a plan as a
        whole."""
        self.start_load(plan)
        for layer in self.layers:
            self.wait_layer(layer)

    def end_plan(self, plan: StepPlan) -> TransferReport | None:
        """Note that the model has run a whole plan. Returns the report for its result; None without news."""
        for layer in self.layers:
            self.save_layer(layer)
        return self.finished(plan)

    def start_load(self, plan: StepPlan) -> None:
        """Start the plan's loads of blocks; the copies of all earlier plans have been started."""

    def wait_layer(self, layer: int) -> None:
        """Make a layer's computation in this plan wait until loads of that layer have ended."""

    def save_layer(self, layer: int) -> None:
        """Start to send or store a layer's blocks; called when the plan's work on the layer is computed or enqueued."""

    def finished(self, plan: StepPlan) -> TransferReport | None:
        """Start what follows the plan, such as stores; return the transfers that ended since the last report. If the
        plan awaits a report, wait up to PATIENCE. The plan's copies may still be in progress."""
        return None

    def close(self) -> None:
        """Finish stores and sends within a bounded time. Idempotent. Called at shutdown and sleep."""


class NoWorkerConnector(WorkerConnector):
    """Worker's half without a KV connector: does nothing."""

    def begin_plan(self, plan: StepPlan) -> None:
        transfers = plan.transfers
        assert transfers is None or (type(transfers) is HostTransfers and not transfers.awaits_report), (
            "a plan orders transfers, and there is no KV connector"
        )

    def end_plan(self, plan: StepPlan) -> None:
        """Return no report."""
