from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import msgspec

from quire.config.options import EngineOptions
from quire.config.parallel import share_experts
from quire.engine.client import EngineClient
from quire.engine.fleet import Fleet
from quire.engine.messages import EngineReady
from quire.engine.process_client import ProcessClient
from quire.kv_cache.stats import EngineStats
from quire.parallel.replica_memory import CommonMemory


def open_fleet(
    options: EngineOptions, executor: str, *, restarts: bool | None = None, hung_engine_timeout: float = 0.0
) -> Fleet:
    """Open `data_parallel_size` engines in their own processes. Later engines get as many blocks as the first. Each
    writes its own step log, if any. restarts: None: if there are several engines. hung_engine_timeout: see Fleet."""
    counts = [itertools.count() for _ in range(options.data_parallel_size)]
    common = CommonMemory(len(counts)) if share_experts(options) else None

    def start(replica: int, ready: EngineReady | None, stats: EngineStats | None) -> EngineClient:
        changes: dict[str, Any] = {}
        if ready is not None and ready.num_blocks:
            changes["num_blocks_override"] = ready.num_blocks
        if stats is not None and stats.num_host_blocks:
            changes["swap_space"] = stats.num_host_blocks * stats.block_bytes * len(counts)  # it takes its share of it
        number = next(counts[replica])
        if options.step_log is not None:
            marks = (f".replica{replica}" if replica else "") + (f".{number}" if number else "")
            changes["step_log"] = options.step_log + marks
        name = f"engine {replica}" if len(counts) > 1 else "engine"
        replicas = None if common is None else common.of_replica(replica)
        return ProcessClient(
            msgspec.structs.replace(options, **changes), executor=executor, name=name, replicas=replicas
        )

    starts = [partial(start, replica) for replica in range(len(counts))]
    restarts = len(starts) > 1 if restarts is None else restarts
    timeout = hung_engine_timeout if restarts else 0.0
    return Fleet(starts, restarts=restarts, hung_engine_timeout=timeout, common=common)
