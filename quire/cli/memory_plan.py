"""The memory of a model that is not loaded: the engine's own sizing rules, fed with counted sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.cli.devices import Device
from quire.cli.parameters import Checkpoint, ParameterCount, count_parameters, read_checkpoint
from quire.config.engine import EngineConfig
from quire.config.model import DTYPE_BYTES, ModelConfig
from quire.errors import InsufficientMemoryError
from quire.kv_cache.groups import rules_for
from quire.kv_cache.layout import KVCacheLayout, block_bytes, group_layers
from quire.kv_cache.sizing import MemoryProfile, size_pool
from quire.kv_cache.spec import layer_specs
from quire.utils.sizes import format_bytes

LOGIT_BYTES = 4
NUM_LOGIT_COPIES = 3
"""The sampler's working set, in copies of the logits: as computed, filtered, and sorted."""
UNLIMITED_SEQS = 2**40


@dataclass(frozen=True)
class SpeedBound:
    """What no engine on this device can exceed with plain decoding, in tokens per second. Not a measurement.

    step_bytes: weights and KV that one step reads at `batch_size` sequences of `num_tokens`. limit: "bandwidth" or
    "compute", whichever binds.
    """

    batch_size: int
    num_tokens: int
    step_bytes: int
    tokens_per_second: float
    limit: str


@dataclass(frozen=True)
class Concurrency:
    """At one length: KV blocks and bytes of a sequence, and how many sequences fit (the batch: at most
    max_num_seqs)."""

    num_tokens: int
    blocks_per_sequence: int
    bytes_per_sequence: int
    max_sequences: int
    batch_size: int
    bounds: tuple[SpeedBound, ...]


@dataclass(frozen=True)
class MemoryPlan:
    config: EngineConfig
    parameters: ParameterCount
    checkpoint: Checkpoint | None
    weight_bytes: int
    total_memory: int
    activation_bytes: int
    layout: KVCacheLayout
    num_blocks_memory: int
    """Blocks that the budget could hold, before the cap of max_num_seqs sequences of full length."""
    lengths: tuple[Concurrency, ...]

    @property
    def kv_bytes_per_token(self) -> int:
        """Over all layers, while every layer keeps the token."""
        return sum(group.spec.token_bytes * len(group.layers) for group in self.layout.groups)

    def weight_bytes_as(self, dtype: str) -> int:
        return self.parameters.total * DTYPE_BYTES[dtype]


def make_plan(config: EngineConfig, total_memory: int, device: Device | None, lengths: Sequence[int]) -> MemoryPlan:
    """Size the KV pool as the engine would on a machine with `total_memory` bytes for it.

    device: for the bounds on speed; None leaves them out. lengths: tokens per sequence to report. Raises
    InsufficientMemoryError when weights and activations leave no room for a block.
    """
    parameters = count_parameters(config.model)
    weight_bytes = stored_weight_bytes(config.model, parameters)
    if weight_bytes >= total_memory:
        raise InsufficientMemoryError(
            f"the weights alone take {format_bytes(weight_bytes)} as {weight_format(config.model)}, and there are "
            f"{format_bytes(total_memory)} of memory"
        )
    activation_bytes = estimate_activations(config)
    groups, layers_per_group = group_layers(layer_specs(config.model))
    profile = MemoryProfile(available=total_memory - weight_bytes, activations=activation_bytes, weights=weight_bytes)

    def pool(max_num_seqs: int) -> KVCacheLayout:
        return size_pool(
            groups,
            layers_per_group,
            config.cache,
            profile,
            max_model_len=config.model.max_model_len,
            max_num_seqs=max_num_seqs,
        )

    layout = pool(config.scheduler.max_num_seqs)
    plan = MemoryPlan(
        config=config,
        parameters=parameters,
        checkpoint=read_checkpoint(config.model.path),
        weight_bytes=weight_bytes,
        total_memory=total_memory,
        activation_bytes=activation_bytes,
        layout=layout,
        num_blocks_memory=pool(UNLIMITED_SEQS).num_usable_blocks,
        lengths=(),
    )
    return replace(plan, lengths=tuple(_concurrency(plan, num_tokens, device) for num_tokens in lengths))


def weight_format(model: ModelConfig) -> str:
    """How most weights are stored: the quantisation, or the dtype."""
    return model.dtype if model.quantization is None else model.quantization.method


def stored_weight_bytes(model: ModelConfig, parameters: ParameterCount) -> int:
    """Bytes of all weights as the native CPU kernels store them: quantised linear layers with a float32 scale for each
    group of inputs (and an offset, with 4 bits); the vocabulary's matrices in 8 bits when weights are quantised while
    loading, else in the model's dtype. Norms and biases are counted like the layers they belong to."""
    quantization = model.quantization
    if quantization is None:
        return parameters.total * model.dtype_bytes
    table = model.vocab_size * model.hidden_size
    tables = table if parameters.looked_up < table else 2 * table
    table_bytes = model.dtype_bytes if quantization.checkpoint_format else 1
    scale_bytes = (8 if quantization.bits == 4 else 4) / (quantization.group_size or model.hidden_size)
    return int(tables * table_bytes + (parameters.total - tables) * (quantization.bits / 8 + scale_bytes))


def estimate_activations(config: EngineConfig) -> int:
    """Bytes that one forward pass at the full token budget keeps at once: residual stream, normed input and output,
    the wider of attention and MLP, and the sampler's float32 logits. An estimate; the engine measures."""
    model, scheduler = config.model, config.scheduler
    inner = max(int(model.hf.get(key) or 0) for key in ("intermediate_size", "n_inner", "ffn_dim"))
    attention = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    token = 3 * model.hidden_size + max(attention, 3 * (inner or 4 * model.hidden_size))
    logits = NUM_LOGIT_COPIES * scheduler.max_num_seqs * model.vocab_size * LOGIT_BYTES
    return scheduler.max_num_batched_tokens * token * model.dtype_bytes + logits


def _concurrency(plan: MemoryPlan, num_tokens: int, device: Device | None) -> Concurrency:
    layout = plan.layout
    blocks = sum(rules_for(group.spec, layout.block_size).most_blocks(num_tokens, 1) for group in layout.groups)
    fitting = layout.num_usable_blocks // blocks
    batch_size = min(fitting, plan.config.scheduler.max_num_seqs)
    bounds = () if device is None else tuple(_bound(plan, device, size, num_tokens) for size in {1, batch_size} - {0})
    return Concurrency(
        num_tokens=num_tokens,
        blocks_per_sequence=blocks,
        bytes_per_sequence=blocks * layout.block_bytes,
        max_sequences=fitting,
        batch_size=batch_size,
        bounds=tuple(sorted(bounds, key=lambda bound: bound.batch_size)),
    )


def _bound(plan: MemoryPlan, device: Device, batch_size: int, num_tokens: int) -> SpeedBound:
    """One decode step reads every weight once and every sequence's KV once, and multiplies each weight by each row."""
    weights = plan.weight_bytes * plan.parameters.read_per_step // plan.parameters.total
    step_bytes = weights + batch_size * _kv_bytes_read(plan.layout, num_tokens)
    by_bandwidth = step_bytes / device.bandwidth
    by_compute = 2 * plan.parameters.read_per_step * batch_size / device.peak
    return SpeedBound(
        batch_size=batch_size,
        num_tokens=num_tokens,
        step_bytes=step_bytes,
        tokens_per_second=batch_size / max(by_bandwidth, by_compute),
        limit="bandwidth" if by_bandwidth >= by_compute else "compute",
    )


def _kv_bytes_read(layout: KVCacheLayout, num_tokens: int) -> int:
    """Bytes of keys and values that the next token of a sequence of `num_tokens` attends to."""
    total = 0
    for group in layout.groups:
        window = getattr(group.spec, "window", None)
        seen = num_tokens if window is None else min(num_tokens, window)
        total += seen * group.spec.token_bytes * len(group.layers)
    return total


def pool_bytes(layout: KVCacheLayout) -> int:
    return layout.num_usable_blocks * block_bytes(layout.groups, layout.layers_per_group, layout.block_size)
