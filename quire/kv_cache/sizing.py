"""How many blocks the pool gets. Pure arithmetic: the worker measures, this decides, the layout carries the result."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.cache import CacheConfig
from quire.errors import InsufficientMemoryError
from quire.kv_cache.layout import KVCacheLayout, KVGroup, block_bytes
from quire.utils.sizes import format_bytes


@dataclass(frozen=True)
class MemoryProfile:
    """What the worker measured after loading the weights. Bytes.

    available: memory that this process could still take, before the profiling pass (on a CPU the smaller of the
    system's available memory and the cgroup's limit minus its use). activations: peak growth during one forward
    pass with dummy data at the full token budget. weights: bytes of the model's parameters.
    """

    available: int
    activations: int
    weights: int


def size_pool(
    groups: tuple[KVGroup, ...],
    layers_per_group: int,
    cache: CacheConfig,
    profile: MemoryProfile | None,
    *,
    max_model_len: int,
    max_num_seqs: int,
) -> KVCacheLayout:
    """Choose the number of blocks and return the layout.

    `num_blocks_override` and `kv_cache_memory` are obeyed, and need no `profile`. Otherwise the pool takes
    `memory_utilization` of what is available less the activations, but never more than `max_num_seqs` sequences of
    full length can use. Raises InsufficientMemoryError, with the arithmetic, when not even one block fits; a pool
    that is smaller than one sequence of `max_model_len` is allowed: the engine then lowers `max_model_len`.
    """
    bytes_per_block = block_bytes(groups, layers_per_group, cache.block_size)
    if cache.num_blocks_override is not None:
        num_blocks = cache.num_blocks_override
        budget, rule = num_blocks * bytes_per_block, "num_blocks_override"
    elif cache.memory is not None:
        budget, rule = cache.memory, "kv_cache_memory"
        num_blocks = budget // bytes_per_block
    else:
        assert profile is not None, "without a given size the memory must be measured"
        budget = int((profile.available - profile.activations) * cache.memory_utilization)
        rule = (
            f"({format_bytes(profile.available)} available - {format_bytes(profile.activations)} activations) "
            f"x {cache.memory_utilization:g}"
        )
        most_useful = len(groups) * max_num_seqs * -(-max_model_len // cache.block_size)
        num_blocks = min(budget // bytes_per_block, most_useful)
    if num_blocks < 1:
        raise InsufficientMemoryError(
            f"no memory for the KV cache: {rule} = {format_bytes(max(budget, 0))}, and one block of "
            f"{cache.block_size} tokens takes {format_bytes(bytes_per_block)}"
        )
    return KVCacheLayout(
        block_size=cache.block_size,
        num_blocks=num_blocks + 1,
        groups=groups,
        layers_per_group=layers_per_group,
    )
