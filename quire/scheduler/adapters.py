"""Scheduler's view of adapters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from quire.adapter_orders import AdapterOrders, AdapterRef
from quire.config.adapters import NO_ADAPTERS, AdaptersConfig
from quire.decoding.sequence import Deferral, Request, RequestStatus
from quire.errors import UserError
from quire.kv_cache.stats import EngineStats
from quire.scheduler.admission import Quote
from quire.scheduler.gates import GateStage
from quire.scheduler.running import RunningSet

LOADING = "loading adapter"
PATIENCE = 1.0
"""Seconds that a request waits for other adapters before the least used drains."""


class AdapterSlots:
    """Scheduler's view of the workers' adapter slots, 1 to num_slots."""

    def __init__(self, running: RunningSet, config: AdaptersConfig = NO_ADAPTERS) -> None:
        self._running = running
        self._config = config
        self.are_any = config.num_slots > 0
        self._free = list(range(config.num_slots, 0, -1))
        self._held: dict[bytes, int] = {}
        """Digest -> slot of loaded adapters, the least recently used first."""
        self._loading: dict[bytes, int] = {}
        self._orders: list[tuple[int, AdapterRef]] = []
        self.refused: list[tuple[Request, UserError]] = []
        self._in_use: Counter[bytes] = Counter()
        self._counted = -1
        """Version of the running set that `_in_use` counts."""
        self.num_loads = 0
        self.crowded_out: dict[str, float] = {}
        """Live request's id, if it waits for other adapters' requests -> time since when, earliest first."""
        self.holds_new = False
        """True while the engine is paused: no waiting request can start."""
        self._searched = -1
        """Version of the running set in which `take_victims` has found all."""

    def slot_of(self, adapter: AdapterRef) -> int | None:
        """Adapter's slot, which becomes most recently used; None: not loaded."""
        slot = self._held.pop(adapter.digest, None)
        if slot is not None:
            self._held[adapter.digest] = slot
        return slot

    def is_loading(self, adapter: AdapterRef) -> bool:
        return adapter.digest in self._loading

    def begin_load(self, adapter: AdapterRef) -> bool:
        """Order a load into a free slot, or replace the least recently used adapter without running requests. False: no
        slot."""
        if not self._free:
            used = self.in_use()
            idle = next((digest for digest in self._held if digest not in used), None)
            if idle is None:
                return False
            self._free.append(self._held.pop(idle))
        slot = self._loading[adapter.digest] = self._free.pop()
        self._orders.append((slot, adapter))
        self.num_loads += 1
        return True

    def in_use(self) -> Mapping[bytes, int]:
        """Digest of an adapter -> number of its running sequences."""
        if self._counted != self._running.version:
            adapters = (each.request.adapter for each in self._running.sequences)
            self._in_use = Counter(adapter.digest for adapter in adapters if adapter is not None)
            self._counted = self._running.version
        return self._in_use

    def is_least_used(self, adapter: AdapterRef) -> bool:
        """True if the adapter has the fewest running sequences of all adapters in use."""
        used = self.in_use()
        return adapter.digest == min(used, key=lambda digest: used[digest], default=b"")

    def has_room(self, adapter: AdapterRef) -> bool:
        """True if the adapter runs, or fewer than `max_loras` adapters do."""
        used = self.in_use()
        return adapter.digest in used or len(used) < self._config.max_running

    @property
    def makes_room(self) -> bool:
        """True while background requests leave their adapters to a live request; no further one starts."""
        return bool(self.crowded_out) and not self.holds_new

    def take_victims(self) -> list[Request]:
        """Running background requests to preempt, the last first, whose adapters no live request uses, while one waits
        for adapters."""
        if not self.makes_room or self._searched == self._running.version:
            return []
        self._searched = self._running.version
        requests = dict.fromkeys(each.request for each in reversed(self._running.sequences))
        live = {each.adapter.digest for each in requests if each.adapter is not None and not each.is_background}
        return [
            each
            for each in requests
            if each.is_background and each.adapter is not None and each.adapter.digest not in live
        ]

    def has_idle_slot(self) -> bool:
        used = self.in_use()
        return bool(self._free) or any(digest not in used for digest in self._held)

    def take_orders(self, *, may_wait: bool) -> AdapterOrders | None:
        """Next plan's adapter orders; None: none. may_wait: workers, with nothing else to compute, may wait until a
        load ends."""
        orders, self._orders = self._orders, []
        if not orders and not (may_wait and self._loading):
            return None
        return AdapterOrders(orders, awaits_report=may_wait)

    def update(self, ended: Iterable[tuple[int, str]], requests: Iterable[Request]) -> None:
        """Process a result's ended loads (slot, error). requests: live ones; those whose adapter failed to load are
        refused."""
        for slot, error in ended:
            digest = next(digest for digest, loading in self._loading.items() if loading == slot)
            del self._loading[digest]
            if not error:
                self._held[digest] = slot
                continue
            self._free.append(slot)
            for request in requests:
                if request.adapter is not None and request.adapter.digest == digest:
                    self.refused.append((request, UserError(error, param="lora_request")))

    def take_refused(self) -> list[tuple[Request, UserError]]:
        refused, self.refused = self.refused, []
        return [(request, error) for request, error in refused if request.live_sequences]

    def report_stats(self, stats: EngineStats, waiting: Iterable[Request]) -> None:
        if not self._config.is_on:
            return
        stats.max_running_adapters = self._config.max_running
        stats.num_adapter_slots = self._config.num_slots
        stats.num_loaded_adapters = len(self._held)
        stats.adapter_loads_total = self.num_loads
        stats.running_adapters = _names(each.request for each in self._running.sequences)
        stats.waiting_adapters = _names(waiting)

    def forget_workers(self) -> None:
        self._free += [*self._held.values(), *self._loading.values()]
        self._held.clear()
        self._loading.clear()
        self._orders.clear()


def _names(requests: Iterable[Request]) -> list[str]:
    return list(dict.fromkeys(each.adapter.name for each in requests if each.adapter is not None))


class AdapterGate:
    """Defers a request with an adapter until workers hold it and fewer than `max_loras` others run. Once a request has
    waited PATIENCE seconds for others, no request of the least used running adapter starts. Background requests wait
    like this only for one another, and behind live ones."""

    reason = LOADING
    stage = GateStage.BEGIN

    def __init__(self, slots: AdapterSlots) -> None:
        self._slots = slots
        self._lines: dict[str, float] = {}
        """Background requests' `AdapterSlots.crowded_out`."""

    def check(self, request: Request, quote: Quote, now: float) -> Deferral | None:
        slots, adapter = self._slots, request.adapter
        if adapter is None:
            return None
        if request.is_background and slots.makes_room:
            return Deferral(self.reason, 0, lambda: slots.makes_room, reserves_slots=False)
        slot = slots.slot_of(adapter)
        if slot is None:
            if slots.is_loading(adapter) or slots.begin_load(adapter):
                return Deferral(self.reason, 0, lambda: slots.is_loading(adapter), reserves_slots=False)
            self._waits_beside(request).setdefault(request.request_id, now)
            return Deferral(self.reason, 0, lambda: not slots.has_idle_slot(), reserves_slots=False)
        if not slots.has_room(adapter):
            self._waits_beside(request).setdefault(request.request_id, now)
            return Deferral(self.reason, 0, lambda: not slots.has_room(adapter), reserves_slots=False)
        if self._has_to_drain(request, adapter, now) and request.status is not RequestStatus.PREEMPTED:
            return Deferral(
                self.reason,
                0,
                lambda: bool(self._waits_beside(request)) and slots.is_least_used(adapter),
                reserves_slots=False,
            )
        request.adapter_slot = slot
        return None

    def _waits_beside(self, request: Request) -> dict[str, float]:
        """Request id -> time since when it waits, of live or of background requests, like `request`."""
        return self._lines if request.is_background else self._slots.crowded_out

    def _has_to_drain(self, request: Request, adapter: AdapterRef, now: float) -> bool:
        since = next(iter(self._waits_beside(request).values()), now)
        return now - since >= PATIENCE and self._slots.is_least_used(adapter)

    def forget(self, request: Request) -> None:
        self._waits_beside(request).pop(request.request_id, None)
