"""Sizes of the pools, computed from the worker's measurements."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.config.cache import CacheConfig
from quire.errors import InsufficientMemoryError
from quire.kv_cache.layout import KVCacheLayout, KVGroup, block_bytes
from quire.utils.sizes import format_bytes

DEFAULT_SWAP_SPACE = 4 * 2**30
DEFAULT_SWAP_SHARE = 0.5
"""Largest share of free memory for the host pool when `swap_space` is unset."""


@dataclass(frozen=True)
class DeviceShare:
    """Memory of a device of its own, in bytes. used: taken by this engine so far (weights, libraries). graphs: kept for
    CUDA graphs. tables: rows, block tables and inputs. host_available: host memory for swapped blocks."""

    total: int
    used: int
    graphs: int
    tables: int
    host_available: int


@dataclass(frozen=True)
class MemoryProfile:
    """Worker's measurements after loading the weights, in bytes. available: free memory before the profiling pass (on a
    CPU also bounded by the cgroup). activations: peak growth in one forward pass of dummy data at the full token
    budget. device: set if the pools are in different memories."""

    available: int
    activations: int
    weights: int
    device: DeviceShare | None = None

    def share(self, num_replicas: int) -> MemoryProfile:
        """One engine's share of a host's memory, where the first of `num_replicas` engines has measured it for all."""
        others = (num_replicas - 1) * self.weights
        return replace(self, available=max(0, self.available - others) // num_replicas)

    @property
    def free(self) -> int:
        """Bytes that device pool and host pool may take together; with a device's own memory, only the device
        pool's."""
        kept = 0 if self.device is None else self.device.graphs + self.device.tables
        return self.available - self.activations - kept

    def host_free(self, device_pool: int) -> int:
        """Bytes for the host pool, beside `device_pool` bytes of blocks."""
        return self.free - device_pool if self.device is None else self.device.host_available

    def budget(self, utilization: float, swap_space: int) -> tuple[int, str]:
        """(bytes for the pool, text that shows how they were computed, for errors and logs)."""
        rest = f"{format_bytes(self.activations)} activations"
        if self.device is None:
            swap = f" - {format_bytes(swap_space)} swap space" if swap_space else ""
            rule = f"({format_bytes(self.available)} available - {rest}{swap}) x {utilization:g}"
            return int((self.free - swap_space) * utilization), rule
        device = self.device
        rest += f" - {format_bytes(device.graphs)} CUDA graphs - {format_bytes(device.tables)} tables"
        share = int(device.total * utilization) - device.used
        if share <= self.available:
            start = (
                f"{format_bytes(device.total)} x {utilization:g} - {format_bytes(device.used)} in use by this engine "
                f"({format_bytes(self.weights)} weights)"
            )
        else:
            start = (
                f"{format_bytes(self.available)} free ({format_bytes(device.total)} x {utilization:g} - "
                f"{format_bytes(device.used)} in use by this engine would be {format_bytes(max(share, 0))}, but others "
                "use the device)"
            )
        return min(share, self.available) - self.available + self.free, f"{start} - {rest}"


def size_pool(
    groups: tuple[KVGroup, ...],
    layers_per_group: int,
    cache: CacheConfig,
    profile: MemoryProfile | None,
    *,
    max_model_len: int,
    max_num_seqs: int,
) -> KVCacheLayout:
    """Choose the numbers of blocks and return the layout. `num_blocks_override`, `kv_cache_memory` and `swap_space`
    need no `profile`. Otherwise the pool takes `memory_utilization` of the available memory (on a device: of its
    memory), less all other uses. The default swap space is DEFAULT_SWAP_SPACE, at most DEFAULT_SWAP_SHARE of free host
    memory; neither exceeds `max_num_seqs` full sequences. Raises InsufficientMemoryError, with the arithmetic, when a
    pool has no room for one block."""
    if not groups:
        return KVCacheLayout(cache.block_size, 1, groups, layers_per_group)
    profile = None if profile is None else profile.share(cache.num_replicas)
    bytes_per_block = block_bytes(groups, layers_per_group)
    most_useful = most_useful_blocks(groups, max_num_seqs, max_model_len)
    num_host_blocks = 0
    if cache.num_blocks_override is not None:
        num_blocks = cache.num_blocks_override
        budget, rule = num_blocks * bytes_per_block, "num_blocks_override"
    elif cache.memory is not None:
        budget, rule = cache.memory, "kv_cache_memory"
        num_blocks = budget // bytes_per_block
    else:
        assert profile is not None, "without a given size the memory must be measured"
        num_host_blocks = _num_host_blocks(groups, cache, profile.host_free(0), bytes_per_block, most_useful)
        budget, rule = profile.budget(cache.memory_utilization, num_host_blocks * bytes_per_block)
        num_blocks = min(budget // bytes_per_block, most_useful)
    if num_blocks < 1:
        raise InsufficientMemoryError(
            f"no memory for the KV cache: {rule} = {format_bytes(max(budget, 0))}, and one block of "
            f"{_tokens(groups)} tokens takes {format_bytes(bytes_per_block)}"
        )
    if cache.num_blocks_override is not None or cache.memory is not None:
        free = 0 if profile is None else profile.host_free(num_blocks * bytes_per_block)
        num_host_blocks = _num_host_blocks(groups, cache, free, bytes_per_block, most_useful)
    return KVCacheLayout(
        block_size=cache.block_size,
        num_blocks=num_blocks + 1,
        groups=groups,
        layers_per_group=layers_per_group,
        num_host_blocks=num_host_blocks,
    )


def most_useful_blocks(groups: tuple[KVGroup, ...], max_num_seqs: int, max_model_len: int) -> int:
    """Number of blocks that `max_num_seqs` sequences of full length can use."""
    return max_num_seqs * sum(-(-max_model_len // group.block_size) for group in groups)


def _tokens(groups: tuple[KVGroup, ...]) -> int:
    return min(group.block_size for group in groups)


def _num_host_blocks(
    groups: tuple[KVGroup, ...], cache: CacheConfig, free: int, bytes_per_block: int, most_useful: int
) -> int:
    """Number of host blocks for swapping. free: bytes of which the default takes its share. most_useful: upper
    bound."""
    if cache.swap_space == 0:
        return 0
    if cache.swap_space is not None:
        budget, rule = cache.swap_space, "swap_space"
    else:
        budget = min(DEFAULT_SWAP_SPACE, int(free * DEFAULT_SWAP_SHARE))
        rule = f"{DEFAULT_SWAP_SHARE:g} of {format_bytes(max(free, 0))} that are free"
    if budget < bytes_per_block:
        raise InsufficientMemoryError(
            f"no memory to swap to: {rule} = {format_bytes(max(budget, 0))}, and one block of "
            f"{_tokens(groups)} tokens takes {format_bytes(bytes_per_block)}"
        )
    return min(budget // bytes_per_block, most_useful)
