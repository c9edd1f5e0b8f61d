"""Observers of an engine core: a step log, a recorder, meters. The core without any does nothing for them."""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.messages import Call
from quire.executors.interface import StepFuture
from quire.kv_cache.layout import KVCacheLayout
from quire.step import SamplingInputs, StepPlan

StepEnd = Callable[[StepFuture], object]
"""Called with the future of a plan that has ended, on the thread that ended it."""


class Observer:
    """The events of a core that an observer may override; here each does nothing. The core calls them on its own thread
    in the order in which things happen, so an observer that takes long slows the steps. An exception ends the engine.
    """

    def allocated(self, layout: KVCacheLayout, backend: str) -> None:
        """The KV cache has its memory. backend: what the executor says of itself. Comes before all other events."""

    def executes(self, plan: StepPlan) -> StepEnd | None:
        """The executor is about to get a plan. Returns what to call at the plan's end, if anything."""

    def sends(self, inputs: SamplingInputs) -> None:
        """The executor is about to get the sampling inputs of the last plan."""

    def calls(self, call: Call) -> None:
        """The core is about to answer a control call (sleep, wake up, reset of the prefix cache, and so on)."""

    def ends(self) -> None:
        """The core has shut down: no other event follows."""
