"""The systems that are compared, by name: what to give an EngineCore, or a simulation, as its scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from benchmarks.baselines.contiguous import ContiguousScheduler
from benchmarks.baselines.faster_transformer import FasterTransformerScheduler
from benchmarks.baselines.orca import OrcaScheduler
from benchmarks.baselines.reservation import Reservation, reserve_max, reserve_oracle, reserve_pow2
from quire.config.engine import EngineConfig
from quire.kv_cache.layout import KVCacheLayout
from quire.scheduler.interface import EngineScheduler, SchedulerFactory, paged_scheduler
from quire.scheduler.preemption import PreemptionCosts


def _contiguous(
    make: type[ContiguousScheduler],
    reservation: Reservation,
    config: EngineConfig,
    layout: KVCacheLayout,
    costs: PreemptionCosts | None,
) -> EngineScheduler:
    return make(config, layout, reservation)


PAGED = "Quire"
ORCA_MAX, ORCA_POW2, ORCA_ORACLE = "Orca (Max)", "Orca (Pow2)", "Orca (Oracle)"
FASTER_TRANSFORMER = "FasterTransformer"

SYSTEMS: Mapping[str, SchedulerFactory] = MappingProxyType(
    {
        FASTER_TRANSFORMER: partial(_contiguous, FasterTransformerScheduler, reserve_max),
        ORCA_MAX: partial(_contiguous, OrcaScheduler, reserve_max),
        ORCA_POW2: partial(_contiguous, OrcaScheduler, reserve_pow2),
        ORCA_ORACLE: partial(_contiguous, OrcaScheduler, reserve_oracle),
        PAGED: paged_scheduler,
    }
)
"""In the paper's order, the least first."""
