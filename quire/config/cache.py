from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SNAPSHOT_INTERVAL = 1024
"""Default of `state_snapshot_interval`, in tokens."""


@dataclass(frozen=True)
class CacheConfig:
    """KV cache settings of an engine; fields with an option's name have its meaning. memory: bytes of the pool; None:
    free memory after profiling times `memory_utilization`. swap_space: bytes of the host pool; None: from free memory.
    offload_dir: directory of cached blocks. offload_size: its bytes. num_replicas: engines that share the measured
    memory."""

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
        """True if both pools' sizes follow from the options alone, without measuring."""
        return (self.num_blocks_override is not None or self.memory is not None) and self.swap_space is not None
