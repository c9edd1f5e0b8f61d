"""Observers of an engine core: step logs, recorders, meters."""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.messages import Call
from quire.executors.interface import StepFuture
from quire.kv_cache.layout import KVCacheLayout
from quire.step import SamplingInputs, StepPlan

StepEnd = Callable[[StepFuture], object]
"""Callback for the future of an ended plan, on the thread that ended it."""


class CoreObserver:
    """Event handlers of an engine core (step log, simulator, tests); override those you need. The core calls them in
    order on its own thread. An exception ends the engine."""

    def allocated(self, layout: KVCacheLayout, backend: str) -> None:
        """The KV cache is allocated; first event. backend: executor's description of itself."""

    def executes(self, plan: StepPlan) -> StepEnd | None:
        """The executor is about to get a plan. Returns a callback for the plan's end, or None."""

    def sends(self, inputs: SamplingInputs) -> None:
        """The executor is about to get the sampling inputs of the last plan."""

    def calls(self, call: Call) -> None:
        """The core is about to answer a control call."""

    def ends(self) -> None:
        """The core has shut down; last event."""
