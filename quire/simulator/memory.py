from __future__ import annotations

from quire.config.cache import SNAPSHOT_INTERVAL
from quire.config.model_shape import DTYPE_BYTES, ModelShape
from quire.config.parallel import ParallelConfig
from quire.errors import InsufficientMemoryError
from quire.kv_cache.layout import KVGroup, block_bytes, group_layers
from quire.kv_cache.sizing import most_useful_blocks
from quire.kv_cache.spec import LayerSpec, layer_spec
from quire.simulator.cost import CostModel
from quire.utils.sizes import format_bytes

LOGIT_BYTES = 4
PART_BYTES = 4
NUM_LOGIT_COPIES = 3
"""Sampler's copies of the logits: computed, filtered and sorted."""


def activation_bytes(cost: CostModel, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Estimated activation bytes of a step at its full budget on a device, with 16 bits each."""
    total = step_bytes(cost.shape, max_num_batched_tokens, max_num_seqs, tp=cost.layout.tp)
    if cost.tower is not None:
        total += cost.tower.working_bytes(cost.shape.max_model_len)
    experts = cost.shape.experts
    if experts is not None and cost.layout.redundant_experts is not None:  # results of experts, before they are added
        total += PART_BYTES * max_num_batched_tokens * experts.num_active * cost.shape.hidden
    return total


def step_bytes(shape: ModelShape, num_tokens: int, num_seqs: int, *, dtype_bytes: int = 2, tp: int = 1) -> int:
    """Estimated activation bytes of a step, with the sampler's float32 logits."""
    width = shape.intermediate
    if shape.experts is not None:
        width = max(width, shape.experts.num_active * shape.experts.intermediate)
    attention = max(2 * (each.num_heads + each.num_kv_heads) * each.key_dim for each in shape.attention_counts)
    row = 3 * shape.hidden + max(attention, 3 * width) / tp
    return int(dtype_bytes * num_tokens * row + NUM_LOGIT_COPIES * num_seqs * shape.vocab * LOGIT_BYTES)


def kv_cache_bytes(
    cost: CostModel, *, utilization: float, max_num_batched_tokens: int, max_num_seqs: int, adapters: int = 0
) -> int:
    """Bytes of a share of the device's memory that remain for the KV cache. Raises InsufficientMemoryError, with the
    arithmetic, when none do."""
    hardware = cost.hardware
    weights = int(cost.weight_bytes_per_device)
    activations = activation_bytes(cost, max_num_batched_tokens, max_num_seqs)
    left = int(hardware.memory * utilization) - weights - adapters - activations
    if left <= 0:
        raise InsufficientMemoryError(
            f"{cost.shape.name} does not fit {hardware.title} with {cost.layout}: of {format_bytes(hardware.memory)} x "
            f"{utilization:g} the weights take {format_bytes(weights)}"
            + (f", adapters {format_bytes(adapters)}" if adapters else "")
            + f" and activations {format_bytes(activations)}"
        )
    return left


def check_pool(cost: CostModel, num_bytes: int) -> None:
    """Raise InsufficientMemoryError for a KV cache that does not fit beside the weights."""
    weights, memory = int(cost.weight_bytes_per_device), int(cost.hardware.memory)
    if weights + num_bytes > memory:
        raise InsufficientMemoryError(
            f"{cost.shape.name} does not fit {cost.hardware.title} with {cost.layout}: the weights take "
            f"{format_bytes(weights)} and the KV cache {format_bytes(num_bytes)} of {format_bytes(memory)}"
        )


def pool_bytes(cost: CostModel, num_blocks: int, block_size: int) -> int:
    return num_blocks * block_bytes(*_groups(cost, block_size))


def most_useful_bytes(
    cost: CostModel, max_num_seqs: int, max_model_len: int, block_size: int, snapshot_interval: int
) -> int:
    """Pool bytes for `max_num_seqs` sequences of full length; the engine takes no more (quire/kv_cache/sizing.py)."""
    groups, _ = _groups(cost, block_size, snapshot_interval)
    return pool_bytes(cost, most_useful_blocks(groups, max_num_seqs, max_model_len), block_size)


def device_specs(shape: ModelShape, dtype: str, layout: ParallelConfig) -> list[LayerSpec]:
    """KV-cache specs of one device's layers, in the largest pipeline stage."""
    stage, size = shape.layers[: shape.layers_per_stage(layout.pp)], int(DTYPE_BYTES[dtype])
    return [layer_spec(layer.attention, size, num_ranks=layout.tp, dealt_to=layout.dcp) for layer in stage]


def _groups(
    cost: CostModel, block_size: int, snapshot_interval: int = SNAPSHOT_INTERVAL
) -> tuple[tuple[KVGroup, ...], int]:
    return group_layers(device_specs(cost.shape, cost.precision.kv, cost.layout), block_size, snapshot_interval)
