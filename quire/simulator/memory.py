"""The memory of a device: weights, activations, and the rest for the KV cache."""

from __future__ import annotations

from quire.errors import InsufficientMemoryError
from quire.kv_cache.layout import KVGroup, block_bytes, group_layers
from quire.kv_cache.sizing import most_useful_blocks
from quire.simulator.cost import CostModel
from quire.utils.sizes import format_bytes

LOGIT_BYTES = 4
NUM_LOGIT_COPIES = 3
"""The sampler's working set, in copies of the logits: as computed, filtered, and sorted."""


def activation_bytes(cost: CostModel, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """An estimate of the bytes of activations of a step at its full budget on a device: the residual stream three
    times, the wider of attention and MLP, and the sampler's logits. The engine measures it."""
    shape, tp = cost.shape, cost.layout.tp
    width = shape.intermediate
    if shape.experts is not None:
        width = max(width, shape.experts.num_active * shape.experts.intermediate)
    attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    row = 3 * shape.hidden + max(attention, 3 * width) / tp
    logits = NUM_LOGIT_COPIES * max_num_seqs * shape.vocab * LOGIT_BYTES
    return int(2 * max_num_batched_tokens * row + logits)


def kv_cache_bytes(cost: CostModel, *, utilization: float, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Bytes left for the KV cache of a share of the device's memory. Raises InsufficientMemoryError, with the
    arithmetic, when nothing is."""
    hardware = cost.hardware
    weights = int(cost.weight_bytes_per_device)
    activations = activation_bytes(cost, max_num_batched_tokens, max_num_seqs)
    left = int(hardware.memory * utilization) - weights - activations
    if left <= 0:
        raise InsufficientMemoryError(
            f"{cost.shape.name} does not fit {hardware.title} with {cost.layout}: of {format_bytes(hardware.memory)} x "
            f"{utilization:g} the weights take {format_bytes(weights)} and activations {format_bytes(activations)}"
        )
    return left


def check_pool(cost: CostModel, num_bytes: int) -> None:
    """Raise InsufficientMemoryError for a KV cache of a given size that does not fit beside the weights."""
    weights, memory = int(cost.weight_bytes_per_device), int(cost.hardware.memory)
    if weights + num_bytes > memory:
        raise InsufficientMemoryError(
            f"{cost.shape.name} does not fit {cost.hardware.title} with {cost.layout}: the weights take "
            f"{format_bytes(weights)} and the KV cache {format_bytes(num_bytes)} of {format_bytes(memory)}"
        )


def pool_bytes(cost: CostModel, num_blocks: int, block_size: int) -> int:
    """Bytes of a pool of `num_blocks` blocks, on each device."""
    return num_blocks * block_bytes(*_groups(cost, block_size))


def most_useful_bytes(cost: CostModel, max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """Bytes that `max_num_seqs` sequences of full length use: the engine takes no more (quire/kv_cache/sizing.py)."""
    groups, _ = _groups(cost, block_size)
    return pool_bytes(cost, most_useful_blocks(groups, max_num_seqs, max_model_len), block_size)


def _groups(cost: CostModel, block_size: int) -> tuple[tuple[KVGroup, ...], int]:
    return group_layers(cost.shape.layer_specs(cost.precision.kv, cost.layout), block_size)
