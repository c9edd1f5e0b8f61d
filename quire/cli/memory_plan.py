"""Memory of a model not loaded, by the engine's sizing rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.cli.checkpoint import Checkpoint, read_checkpoint
from quire.config.cache import CacheConfig
from quire.config.engine import EngineConfig
from quire.config.model import DTYPE_BYTES, ModelConfig
from quire.config.model_shape import ModelShape
from quire.config.quantization import QuantizationConfig
from quire.errors import InsufficientMemoryError
from quire.kv_cache.coordinator import Coordinator, padding
from quire.kv_cache.layout import KVCacheLayout, block_bytes, group_layers
from quire.kv_cache.sizing import MemoryProfile, most_useful_blocks, size_pool
from quire.kv_cache.spec import head_specs, layer_specs
from quire.simulator.adapters import reserved_bytes
from quire.simulator.cost import CostModel
from quire.simulator.memory import activation_bytes, device_specs, kv_cache_bytes, step_bytes
from quire.utils.gguf import GGUFFile
from quire.utils.sizes import format_bytes

UNLIMITED_SEQS = 2**40


@dataclass(frozen=True)
class Concurrency:
    """Values at one length: KV blocks and bytes of a sequence per device, sequences that fit, and batch size (limited
    by max_num_seqs)."""

    num_tokens: int
    blocks_per_sequence: int
    bytes_per_sequence: int
    max_sequences: int
    batch_size: int


@dataclass(frozen=True)
class TowerPlan:
    """Vision tower in bytes. weight_bytes: in the model's dtype. working_bytes: kept features and working memory.
    checkpoint: its own file, if it has one."""

    weight_bytes: int
    working_bytes: int
    checkpoint: Checkpoint | None


@dataclass(frozen=True)
class MemoryPlan:
    """`quire plan`'s memory in bytes. weight_bytes: on all devices, without tower; draft_weight_bytes: part of the
    draft model. device_weight_bytes, total_memory, activation_bytes, layout: per device (the largest pipeline stage).
    num_blocks_memory: blocks that fit, without the limit of max_num_seqs full sequences. adapter_bytes: total of all
    slots."""

    config: EngineConfig
    shape: ModelShape
    weight_format: str
    checkpoint: Checkpoint | None
    weight_bytes: int
    device_weight_bytes: int
    total_memory: int
    activation_bytes: int
    adapter_bytes: int
    layout: KVCacheLayout
    num_blocks_memory: int
    lengths: tuple[Concurrency, ...]
    draft_weight_bytes: int = 0
    tower: TowerPlan | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes per token over all layers of a device, while every layer keeps the token."""
        kept = (group.spec.token_bytes // group.spec.dealt_to * len(group.layers) for group in self.layout.groups)
        return sum(kept)

    @property
    def kv_padding(self) -> float:
        """Unusable share (0 to 1) of the blocks of a full-length sequence."""
        return padding(self.layout.groups, self.layout.block_bytes, self.config.model.max_model_len)

    def weight_bytes_as(self, dtype: str) -> int:
        return self.shape.parameters() * DTYPE_BYTES[dtype]


def plan_engine(config: EngineConfig, total_memory: int, lengths: Sequence[int]) -> MemoryPlan:
    """Plan a model as the engine runs it on this kind of machine, with `total_memory` bytes.

    lengths: tokens per sequence to report. Raises InsufficientMemoryError if the model leaves no room for a block.
    """
    shape = config.model.resolved_shape()
    is_native, draft = config.device.attention_backend == "native", config.speculation.draft
    weight_bytes = stored_weight_bytes(config.model, shape, is_native=is_native)
    specs = layer_specs(config.model)
    if config.speculation.method == "mtp":
        specs += head_specs(config.model)
    if draft is not None:
        draft_bytes = stored_weight_bytes(draft, draft.resolved_shape(), is_native=is_native)
        weight_bytes, specs = weight_bytes + draft_bytes, [*specs, *layer_specs(draft)]
    if weight_bytes >= total_memory:
        raise InsufficientMemoryError(
            f"the weights alone take {format_bytes(weight_bytes)} as {weight_format(config.model)}, and there are "
            f"{format_bytes(total_memory)} of memory"
        )
    activations = estimate_activations(config)
    groups, layers_per_group = group_layers(specs, config.cache.block_size, config.cache.state_snapshot_interval)
    elements = config.adapters.elements_of(shape)
    outputs = 0 if config.model.pooling is None else len(config.model.pooling.labels)
    if outputs and config.model.is_encoder:
        outputs += shape.hidden  # of the head's first layer
        elements += outputs + 2 * shape.hidden
    adapters = config.adapters.slot_bytes(elements) + config.adapters.saved_bytes(outputs * (shape.hidden + 1))
    tower = _tower(config)
    activations_held = activations if tower is None else activations + tower.working_bytes
    held = weight_bytes + adapters + (0 if tower is None else tower.weight_bytes)
    profile = MemoryProfile(available=total_memory - held, activations=activations_held, weights=held)

    def pool(max_num_seqs: int) -> KVCacheLayout:
        return size_pool(
            groups,
            layers_per_group,
            config.cache,
            profile,
            max_model_len=config.model.max_model_len,
            max_num_seqs=max_num_seqs,
        )

    plan = MemoryPlan(
        config=config,
        shape=shape,
        weight_format=weight_format(config.model),
        checkpoint=read_checkpoint(config.model.path),
        weight_bytes=weight_bytes,
        draft_weight_bytes=0 if draft is None else draft_bytes,
        device_weight_bytes=weight_bytes,
        total_memory=total_memory,
        activation_bytes=activations,
        adapter_bytes=adapters,
        layout=pool(config.scheduler.max_num_seqs),
        num_blocks_memory=pool(UNLIMITED_SEQS).num_usable_blocks,
        lengths=(),
        tower=tower,
    )
    return _with_lengths(plan, lengths)


def _tower(config: EngineConfig) -> TowerPlan | None:
    if config.model.vision is None:
        return None
    from quire.multimodal.inputs import ImageInputs, image_inputs  # imports NumPy, which would slow `--help`

    found = image_inputs(config)
    if not isinstance(found, ImageInputs):
        return None
    tokens = min(config.model.max_model_len, found.largest_tokens)
    own_file = config.model.mmproj
    return TowerPlan(
        weight_bytes=found.vision.num_elements * config.model.dtype_bytes,
        working_bytes=found.vision.working_bytes(tokens),
        checkpoint=None if own_file is None else read_checkpoint(own_file),
    )


def plan_devices(
    cost: CostModel, config: EngineConfig, lengths: Sequence[int], checkpoint: Checkpoint | None
) -> MemoryPlan:
    """Plan a model of any shape on the cost model's devices: weights, activations and KV cache take
    `memory_utilization` of each one's memory. Raises InsufficientMemoryError."""
    shape, scheduler = cost.shape, config.scheduler
    adapters = reserved_bytes(cost, config.adapters)
    tower = None
    if cost.tower is not None:
        tower = TowerPlan(cost.tower.weight_bytes, cost.tower.working_bytes(shape.max_model_len), None)
    specs = device_specs(shape, cost.precision.kv, cost.layout)
    groups, layers_per_group = group_layers(specs, config.cache.block_size, config.cache.state_snapshot_interval)
    budget = config.cache.memory
    if budget is None:
        budget = kv_cache_bytes(
            cost,
            utilization=config.cache.memory_utilization,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_num_seqs=scheduler.max_num_seqs,
        )
        budget = max(0, budget - adapters)
    fitting = budget // block_bytes(groups, layers_per_group)
    most_useful = most_useful_blocks(groups, scheduler.max_num_seqs, config.model.max_model_len)
    given = config.cache.num_blocks_override or (fitting if config.cache.memory is not None else None)
    cache: CacheConfig = replace(config.cache, memory=None, num_blocks_override=given or min(fitting, most_useful))
    layout = size_pool(
        groups,
        layers_per_group,
        cache,
        None,
        max_model_len=config.model.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
    )
    plan = MemoryPlan(
        config=config,
        shape=shape,
        weight_format=cost.precision.weights,
        checkpoint=checkpoint,
        weight_bytes=int(cost.weight_bytes),
        device_weight_bytes=int(cost.weight_bytes_per_device),
        total_memory=int(cost.hardware.memory),
        activation_bytes=activation_bytes(cost, scheduler.max_num_batched_tokens, scheduler.max_num_seqs),
        adapter_bytes=adapters,
        layout=layout,
        num_blocks_memory=max(fitting, layout.num_usable_blocks),
        lengths=(),
        tower=tower,
    )
    return _with_lengths(plan, lengths)


def weight_format(model: ModelConfig) -> str:
    """Storage of most weights: a GGUF file's, the quantization, or the dtype."""
    if model.is_gguf:
        return "the file's blocks, packed"
    return model.dtype if model.quantization is None else model.quantization.method


def stored_weight_bytes(model: ModelConfig, shape: ModelShape, *, is_native: bool = True) -> int:
    """Bytes of all weights as native CPU kernels store them. is_native: False widens a GGUF file's types to floating
    point."""
    if model.is_gguf and is_native:
        from quire.models.gguf.sizes import packed_weight_bytes  # imports NumPy, which would slow `--help`

        with GGUFFile(model.path) as file:
            return packed_weight_bytes(file, model)
    quantization, total = model.quantization, shape.parameters()
    total += shape.expansion_parameters if model.expands_prompts else 0
    if quantization is None:
        return total * model.dtype_bytes
    table = shape.embedding_parameters
    tables = table if shape.is_tied else 2 * table
    table_bytes = model.dtype_bytes if quantization.checkpoint_format else 1
    scale_bytes = _scale_bytes(quantization) / (quantization.group_size or model.hidden_size)
    return int(tables * table_bytes + (total - tables) * (quantization.bits / 8 + scale_bytes))


def _scale_bytes(quantization: QuantizationConfig) -> int:
    if quantization.bits != 4:
        return 4
    if not quantization.is_integer:
        return 1
    return 8 if quantization.checkpoint_format else 4


def estimate_activations(config: EngineConfig) -> int:
    """Estimated bytes of a forward pass at the full token budget; the engine measures them."""
    scheduler, models = config.scheduler, [each for each in (config.model, config.speculation.draft) if each]
    budget, seqs = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    return sum(step_bytes(each.shape, budget, seqs, dtype_bytes=each.dtype_bytes) for each in models)


def _with_lengths(plan: MemoryPlan, lengths: Sequence[int]) -> MemoryPlan:
    return replace(plan, lengths=tuple(_concurrency(plan, num_tokens) for num_tokens in lengths))


def _concurrency(plan: MemoryPlan, num_tokens: int) -> Concurrency:
    layout = plan.layout
    blocks = Coordinator(layout.groups).most_blocks(num_tokens, 1)
    fitting = layout.num_usable_blocks // blocks
    return Concurrency(
        num_tokens=num_tokens,
        blocks_per_sequence=blocks,
        bytes_per_sequence=blocks * layout.block_bytes,
        max_sequences=fitting,
        batch_size=min(fitting, plan.config.scheduler.max_num_seqs),
    )


def pool_bytes(layout: KVCacheLayout) -> int:
    return layout.num_usable_blocks * layout.block_bytes
