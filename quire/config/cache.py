"""The KV-cache slice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SNAPSHOT_INTERVAL = 1024
"""Tokens."""


@dataclass(frozen=True)
class CacheConfig:
    """block_size: tokens per block. memory: bytes for the pool, or None to size it from what is free after the
    profiling pass (times `memory_utilization`). num_blocks_override: exactly this many blocks, whatever they cost.
    swap_space: bytes of the host pool for preempted requests and offloaded blocks; 0: none; None: chosen from what is
    free.
    offload_dir: where cached blocks are kept on disk, None: nowhere; offload_size: bytes that the directory may hold.
    state_snapshot_interval: tokens from one snapshot of a recurrent state to the next, at least
    (quire/kv_cache/layout.py rounds it up).
    prefault: write to the pool when it is allocated, so that its memory is there before the first request.
    num_replicas: engines that share what is measured; given sizes are those of one.
    """

    block_size: int
    memory: int | None
    memory_utilization: float
    num_blocks_override: int | None
    enable_prefix_caching: bool
    swap_space: int | None = 0
    offload_dir: Path | None = None
    offload_size: int = 0
    state_snapshot_interval: int = SNAPSHOT_INTERVAL
    prefault: bool = False
    num_replicas: int = 1

    @property
    def is_size_given(self) -> bool:
        """Whether both pools' sizes follow from the options alone, so that nothing need be measured."""
        return (self.num_blocks_override is not None or self.memory is not None) and self.swap_space is not None
