"""The systems that are compared, by name: what to give an EngineCore, or a simulation, as its scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from quire.bench.baselines.contiguous import ContiguousScheduler
from quire.bench.baselines.faster_transformer import FasterTransformerScheduler
from quire.bench.baselines.orca import OrcaPromptsApartScheduler, OrcaScheduler
from quire.bench.baselines.reservation import Reservation, reserve_max, reserve_oracle, reserve_pow2
from quire.bench.baselines.separate_prompts import SeparatePromptsScheduler
from quire.config.engine import EngineConfig
from quire.kv_cache.layout import KVCacheLayout
from quire.kv_cache.manager import KVCacheManager
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


def _prompts_apart(
    config: EngineConfig, layout: KVCacheLayout, costs: PreemptionCosts | None
) -> SeparatePromptsScheduler:
    kv = KVCacheManager(layout, enable_prefix_caching=config.cache.enable_prefix_caching)
    return SeparatePromptsScheduler(config.scheduler, kv, costs)


PAGED = "Quire"
PROMPTS_APART = "Quire, prompts apart"
ORCA_MAX, ORCA_POW2, ORCA_ORACLE = "Orca (Max)", "Orca (Pow2)", "Orca (Oracle)"
ORCA_POW2_APART, ORCA_ORACLE_APART = "Orca (Pow2), prompts apart", "Orca (Oracle), prompts apart"
FASTER_TRANSFORMER = "FasterTransformer"

SYSTEMS: Mapping[str, SchedulerFactory] = MappingProxyType(
    {
        FASTER_TRANSFORMER: partial(_contiguous, FasterTransformerScheduler, reserve_max),
        ORCA_MAX: partial(_contiguous, OrcaScheduler, reserve_max),
        ORCA_POW2: partial(_contiguous, OrcaScheduler, reserve_pow2),
        ORCA_ORACLE: partial(_contiguous, OrcaScheduler, reserve_oracle),
        ORCA_POW2_APART: partial(_contiguous, OrcaPromptsApartScheduler, reserve_pow2),
        ORCA_ORACLE_APART: partial(_contiguous, OrcaPromptsApartScheduler, reserve_oracle),
        PROMPTS_APART: _prompts_apart,
        PAGED: paged_scheduler,
    }
)
"""In the paper's order, the least first."""
