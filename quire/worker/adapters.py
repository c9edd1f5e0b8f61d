"""Worker's half of LoRA adapters: loading on a separate thread, beside steps."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial

import torch

from quire.adapter_orders import PATIENCE
from quire.config.adapters import ADAPTER_SLOTS
from quire.errors import ModelLoadError
from quire.models.adapters import ModelAdapters
from quire.step import StepPlan


class NoAdapterLoads:
    """AdapterLoads of a model without adapters."""

    def begin_plan(self, plan: StepPlan) -> None:
        """Does nothing."""

    def end_plan(self, plan: StepPlan) -> list[tuple[int, str]]:
        return []

    def end_loads(self) -> None:
        """Does nothing."""

    def reserved_bytes(self) -> int:
        return 0

    def close(self) -> None:
        """Does nothing."""


class AdapterLoads:
    """Loads of one model's adapters (LoRA) into slots, which plans order and Worker starts and reports."""

    def __init__(self, adapters: ModelAdapters) -> None:
        self._adapters = adapters
        self._thread = ThreadPoolExecutor(1, "adapters", initializer=partial(torch.set_num_threads, 1))
        self._loading: dict[int, Future[None]] = {}

    def begin_plan(self, plan: StepPlan) -> None:
        """Start the plan's loads of adapters, and wait for those whose first rows it brings. Raises ModelLoadError for
        a load that failed on this rank alone."""
        for slot, adapter in () if plan.adapters is None else plan.adapters.loads:
            self._loading[slot] = self._thread.submit(self._adapters.load, slot, adapter, self._adapters.steps_so_far())
        if self._loading:
            for new in plan.new_sequences:
                load = self._loading.get(new.columns.get(ADAPTER_SLOTS, 0))
                if load is not None:
                    load.result()

    def end_plan(self, plan: StepPlan) -> list[tuple[int, str]]:
        """Adapter loads that have ended, as (slot, error or ""), for StepResult."""
        if plan.adapters is not None and plan.adapters.awaits_report:
            wait(self._loading.values(), PATIENCE, FIRST_COMPLETED)
        ended = []
        for slot in [slot for slot, load in self._loading.items() if load.done()]:
            error = self._loading.pop(slot).exception()
            if error is not None and not isinstance(error, ModelLoadError):
                raise error
            ended.append((slot, "" if error is None else str(error)))
        return ended

    def end_loads(self) -> None:
        """Wait for the loads begun so far."""
        wait(self._loading.values())

    def reserved_bytes(self) -> int:
        return self._adapters.reserved_bytes()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


def adapter_loads(adapters: ModelAdapters | None) -> AdapterLoads | NoAdapterLoads:
    return NoAdapterLoads() if adapters is None else AdapterLoads(adapters)
