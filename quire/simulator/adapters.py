"""Adapters of simulated requests."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

from quire.adapter_orders import PATIENCE, AdapterOrders, AdapterRef
from quire.config.adapters import ADAPTER_SLOTS, AdaptersConfig
from quire.config.model_shape import DTYPE_BYTES
from quire.simulator.cost import CostModel
from quire.simulator.trace import TraceRequest
from quire.step import StepPlan


def by_zipf(requests: Iterable[TraceRequest], count: int, exponent: float, seed: int) -> Iterator[TraceRequest]:
    """Requests of `count` adapters; the k-th's share is proportional to k ** -exponent."""
    rng = random.Random(f"adapters {seed}")
    bounds = list(itertools.accumulate((1 + rank) ** -exponent for rank in range(count)))
    for request in requests:
        (chosen,) = rng.choices(range(count), cum_weights=bounds)
        yield replace(request, adapter=f"adapter {chosen}")


def adapter_ref(name: str) -> AdapterRef:
    return AdapterRef(name, hashlib.sha256(name.encode()).digest(), name)


def reserved_bytes(cost: CostModel, config: AdaptersConfig) -> int:
    """Bytes of a device's slots."""
    return config.slot_bytes(config.elements_of(cost.shape, cost.expert_share))


class AdapterWork:
    """Serial loads of adapters beside steps, and their matrices' seconds in steps."""

    def __init__(self, cost: CostModel, config: AdaptersConfig, load_seconds: float | None) -> None:
        """load_seconds: None: over PCIe. Adapters are of all projections outside experts."""
        elements = cost.shape.adapter_elements * config.max_rank
        size, hardware = elements * DTYPE_BYTES[config.dtype] / cost.layout.tp, cost.hardware
        self._step_seconds = size / (hardware.bandwidth * hardware.factors.bandwidth)
        over_pcie = size / (hardware.pcie_bandwidth * hardware.factors.pcie)
        self._load_seconds = over_pcie if load_seconds is None else load_seconds
        self._slots: dict[int, int] = {}
        """Sequence -> slot."""
        self._loading: dict[int, tuple[float, bytes]] = {}
        """Slot -> (moment of the load's end, digest)."""
        self._held: dict[int, bytes] = {}
        self._free = 0.0

    def follow(self, plan: StepPlan) -> None:
        for seq_id in plan.released:
            self._slots.pop(seq_id, None)
        for new in plan.new_sequences:
            if slot := new.columns.get(ADAPTER_SLOTS):
                self._slots[new.seq_id] = slot
        for fork in (*plan.forks, *plan.beam_reorders):
            if slot := self._slots.get(fork.parent):
                self._slots[fork.child] = slot

    def seconds(self, plan: StepPlan) -> float:
        """Seconds to read a plan's adapters once."""
        if not self._slots:
            return 0.0
        return self._step_seconds * len({self._slots[each] for each in plan.seq_ids if each in self._slots})

    def take_orders(self, orders: AdapterOrders, now: float) -> None:
        for slot, adapter in orders.loads:
            self._held.pop(slot, None)
            self._free = max(self._free, now) + self._load_seconds
            self._loading[slot] = self._free, adapter.digest

    def awaited(self, now: float) -> float:
        return min(now + PATIENCE, min((end for end, _ in self._loading.values()), default=now))

    def ended(self, now: float) -> list[tuple[int, str]]:
        found = [slot for slot, (end, _) in self._loading.items() if end <= now]
        for slot in found:
            self._held[slot] = self._loading.pop(slot)[1]
        return [(slot, "") for slot in found]

    def holds(self, adapter: AdapterRef) -> bool:
        return adapter.digest in self._held.values()
