"""Loading of a model directory into a model."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from quire.config.eagle import EagleConfig
from quire.config.families import ARCHITECTURES
from quire.config.hf_config import CONFIG_FILE
from quire.config.load import LoadConfig
from quire.config.model import ModelConfig
from quire.config.vision import VISION_TOWERS, read_vision
from quire.errors import ModelLoadError
from quire.kernels.arguments import CacheScale
from quire.layers.adapters import Adapters
from quire.layers.context import LayerContext, WeightSlots
from quire.layers.expert_balance import ExpertBalancer
from quire.layers.experts import ExpertCounters
from quire.layers.operations import TorchOperations
from quire.models.adapters import ModelAdapters
from quire.models.cache_scales import load_cache_scales
from quire.models.checkpoint_names import CheckpointNames, language_tensors, vision_tensors
from quire.models.claims import excess, outline, outline_context
from quire.models.gguf.sizes import packed_weight_bytes
from quire.models.gguf.vision import tower_tensors
from quire.models.gguf.weights import GGUFWeights
from quire.models.interface import CausalLM, LoadableModel
from quire.models.registry import build_model
from quire.models.staged import StagedModel
from quire.models.tied_head import as_embedding, with_head_of
from quire.models.vision import TorchVision, VisionEncoder, VisionTower
from quire.models.weight_files import Progress, Tensors, WeightFiles, find_weights, whole_tensors
from quire.parallel.interface import ExpertExchange, ProcessGroup
from quire.parallel.stage import WHOLE_MODEL, Stage
from quire.quantization.checkpoints import quantized_weights
from quire.quantization.unquantized import UnquantizedLinear
from quire.quantization.weight_format import weight_formats
from quire.utils.process_memory import give_back_memory

if TYPE_CHECKING:
    from quire.kernels.cpu.runtime import NativeRuntime
    from quire.layers.device import DeviceLayers
    from quire.models.decoder import Decoder
    from quire.models.eager_calls import EagerCalls
    from quire.models.native import NativeModel
    from quire.quantization.device import DeviceLinear
    from quire.quantization.packed_device import PackedDeviceLinear

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Extras(NamedTuple):
    """Optional parts of a model; None: off. expert_counts: counters of experts' rows. adapters: the model's. balancer:
    collects layers whose experts change their ranks. exchange: see LayerContext."""

    expert_counts: ExpertCounters | None = None
    adapters: ModelAdapters | None = None
    balancer: ExpertBalancer | None = None
    exchange: ExpertExchange | None = None


NO_EXTRAS = Extras()


def load_model(
    config: ModelConfig,
    load: LoadConfig,
    group: ProcessGroup,
    progress: Progress | None = None,
    runtime: NativeRuntime | None = None,
    device_layers: DeviceLayers | None = None,
    extras: Extras = NO_EXTRAS,
    stage: Stage = WHOLE_MODEL,
) -> CausalLM:
    """Build and load `config`'s model. Floating-point checkpoints are converted to `config.dtype`, or quantised as
    `config.quantization` says. group: ranks that share each layer. runtime: native CPU kernels; device_layers: Triton
    kernels; neither: plain torch. stage: layers to load. progress: called as (bytes done, bytes in all). Raises
    ModelLoadError naming file and tensor."""
    assert runtime is None or device_layers is None, "a model computes in one way"
    files = None if load.load_format == "dummy" else find_weights(config.path, load.load_format)
    are_shared = stage.count > 1 or load.expert_placement is not None
    elsewhere: frozenset[str] = frozenset()
    if isinstance(files, WeightFiles):
        if config.pooling is not None:
            files = files.with_folders([module.folder for module in config.pooling.dense], load.load_format)
        config, files.head_holds = with_head_of(config, files)
        elsewhere = frozenset(_check_room(config, files).slots)
    elif files is not None and are_shared:
        elsewhere = frozenset(outline(config).slots)
    context = _context(config, group, runtime, device_layers)
    adapters = extras.adapters
    of_layers = None if adapters is None else adapters.layers
    context = replace(
        context,
        expert_counts=extras.expert_counts,
        adapters=of_layers,
        stage=stage,
        expert_placement=load.expert_placement,
        balancer=extras.balancer,
        exchange=extras.exchange,
        dealt_to=load.dealt_to,
    )
    model = build_model(config, context, _native_calls(config, runtime))
    report = progress or _silent
    if files is None:
        model.load_weights(dummy_weights(model.slots, load.seed, report, context.device))
    else:
        with torch.inference_mode():
            _load_from(model, files, config, report, elsewhere - model.slots.keys(), context.cache_scales)
    if adapters is not None:
        adapters.model_is_loaded(
            model.slots,
            CheckpointNames.of(config),
            (config.num_heads, config.num_kv_heads),
            partial(checkpoint_tensors, files, config, _silent) if isinstance(files, WeightFiles) else None,
            pools=config.pooling is not None,
            is_encoder=config.is_encoder,
            outline=outline(config, Adapters(adapters.layers.storage)).slots if are_shared else None,
        )
    if runtime is None or config.impl == "transformers":
        return _staged(cast("CausalLM", model), config, context)  # this model computes on tensors itself
    from quire.models.deepseek import expansion_rule
    from quire.models.native import NativeModel
    from quire.quantization.packed import PackedLinear

    for method in (context.linear, context.vocabulary, context.positions):
        cast("PackedLinear", method).trim()
    give_back_memory()
    native = NativeModel(
        cast("Decoder", model),
        runtime,
        expansion_rule(config) if config.expands_prompts else None,
        _packed_share(files, config, model, context) if isinstance(files, GGUFWeights) else None,
    )
    return _staged(native, config, context)


def _packed_share(files: GGUFWeights, config: ModelConfig, model: LoadableModel, context: LayerContext) -> int:
    assert files.header is not None, "the weights have been read"
    total = packed_weight_bytes(files.header, config)
    if context.group.size == context.stage.count == 1:
        return total
    own, whole = (sum(slot.nbytes for slot in each.slots.values()) for each in (model, outline(config)))
    return round(total * (own / config.dtype_bytes) / (whole / torch.float32.itemsize))


def _staged(model: CausalLM, config: ModelConfig, context: LayerContext) -> CausalLM:
    stage = context.stage
    return model if stage.count == 1 else StagedModel(model, stage, config.hidden_size, context.dtype)


def load_head(
    config: ModelConfig,
    eagle: EagleConfig,
    load: LoadConfig,
    group: ProcessGroup,
    model: CausalLM,
    runtime: NativeRuntime | None = None,
    device_layers: DeviceLayers | None = None,
) -> tuple[CausalLM, torch.Tensor | None]:
    """Load a draft head with its own checkpoint for `model`. Returns it and its logits' tokens (None: all in order).
    config: the head's. Others: as `load_model` had for `model`. Raises ModelLoadError."""
    from quire.models.eagle import HEAD, EagleHead, head_tensors

    files = None if load.load_format == "dummy" else find_weights(config.path, load.load_format)
    if isinstance(files, GGUFWeights) or (config.quantization is not None and config.quantization.checkpoint_format):
        raise ModelLoadError(f"{config.path}: heads for drafts are loaded from floating-point checkpoints alone")
    decoder = cast("Decoder", model) if runtime is None else cast("NativeModel", model).decoder
    tables = decoder.tables()
    if device_layers is not None:
        context = _device_context(config, device_layers, group)
    else:
        context = _torch_context(config, group) if runtime is None else _native_context(config, group)
    stored = {HEAD} if eagle.method == "eagle3" else set()
    if files is not None:
        with _named_errors(files):
            stored = {name for name, _ in head_tensors(files.stream(_silent))}
            planned = EagleHead(config, eagle, stored, tables, outline_context(config))
            reason = excess(config, planned, files)
        if reason is not None:
            raise ModelLoadError(f"{files.directory}: {reason}")
    head = EagleHead(config, eagle, stored, tables, context)
    if files is None:
        weights = dummy_weights(head.slots, load.seed, _silent, context.device)
        spread = torch.zeros(eagle.draft_vocab_size, dtype=torch.int64)  # the first tokens
        head.load_weights([*weights, ("d2t", spread)])
    else:
        with _named_errors(files), torch.inference_mode():
            head.load_weights(files.stream(_silent))
    if runtime is None:
        return cast("CausalLM", head), head.token_ids
    from quire.models.native import NativeModel
    from quire.quantization.packed import PackedLinear

    for method in (context.linear, context.vocabulary, context.positions):
        cast("PackedLinear", method).trim()
    give_back_memory()
    return NativeModel(head, runtime), head.token_ids


def load_vision(
    config: ModelConfig,
    load: LoadConfig,
    group: ProcessGroup,
    runtime: NativeRuntime | None = None,
    device_layers: DeviceLayers | None = None,
) -> VisionEncoder:
    """Load the vision tower in `config.dtype` from a checkpoint's `visual.*` tensors. group: each rank has the whole
    tower. runtime, device_layers: see `load_model`. Raises ModelLoadError."""
    if config.vision is None or config.architecture not in VISION_TOWERS:
        raise ModelLoadError(f"{config.path}: no vision tower of {config.architecture} is known")
    vision = read_vision(config.architecture, config.vision, config.hidden_size, str(config.path / CONFIG_FILE))
    context = _context(config, group, runtime, device_layers)
    if len(vision.deepstack_layers) >= config.num_layers:
        raise ModelLoadError(
            f"{config.path}: {len(vision.deepstack_layers)} deep-stack layers add features behind as many layers, and "
            f"the last one is none of them: the language model has {config.num_layers} layers"
        )
    tower = VisionTower(vision, context.replicated())
    if load.load_format == "dummy":
        tower.load_weights(dummy_weights(tower.slots, load.seed, _silent, context.device))
    elif config.mmproj is not None:
        with torch.inference_mode():
            tower.load_weights(tower_tensors(config.mmproj, vision))
    else:
        files = find_weights(config.path, load.load_format)
        assert isinstance(files, WeightFiles), "a GGUF file's tower has a file of its own"
        with _named_errors(files), torch.inference_mode():
            tower.load_weights(vision_tensors(files.stream(_silent)))
    if device_layers is not None:
        from quire.models.device_vision import DeviceVision

        return DeviceVision(tower)
    if runtime is None:
        return TorchVision(tower)
    from quire.models.native_vision import NativeVision
    from quire.quantization.packed import PackedLinear

    cast("PackedLinear", context.positions).trim()
    return NativeVision(tower, runtime)


def _native_calls(config: ModelConfig, runtime: NativeRuntime | None) -> EagerCalls | None:
    if runtime is None or config.impl == "quire":
        return None
    from quire.models.native_calls import NativeCalls

    return NativeCalls(runtime)


def _context(
    config: ModelConfig, group: ProcessGroup, runtime: NativeRuntime | None, device_layers: DeviceLayers | None
) -> LayerContext:
    if device_layers is not None:
        return _device_context(config, device_layers, group)
    return _torch_context(config, group) if runtime is None else _native_context(config, group)


def _torch_context(config: ModelConfig, group: ProcessGroup) -> LayerContext:
    dtype = TORCH_DTYPES[config.dtype]
    plain = UnquantizedLinear(dtype)
    return LayerContext(
        dtype=dtype,
        device=torch.device("cpu"),
        cache_dtype=config.kv_cache_dtype,
        group=group,
        operations=TorchOperations(),
        linear=plain,
        vocabulary=plain,
        positions=plain,
    )


def _native_context(config: ModelConfig, group: ProcessGroup) -> LayerContext:
    from quire.layers.native import NativeOperations
    from quire.quantization.packed import PackedLinear

    linear, vocabulary, positions = (PackedLinear(each) for each in weight_formats(config))
    return LayerContext(
        dtype=torch.float32,
        device=torch.device("cpu"),
        cache_dtype=config.kv_cache_dtype,
        group=group,
        operations=NativeOperations(),
        linear=linear,
        vocabulary=vocabulary,
        positions=positions,
    )


def _device_context(config: ModelConfig, layers: DeviceLayers, group: ProcessGroup) -> LayerContext:
    from quire.layers.device import DeviceOperations
    from quire.quantization.device import DeviceLinear

    dtype = TORCH_DTYPES[config.dtype]
    plain = DeviceLinear(dtype, batch_invariant=layers.batch_invariant)
    return LayerContext(
        dtype=dtype,
        device=layers.device,
        cache_dtype=config.kv_cache_dtype,
        group=group,
        operations=DeviceOperations(),
        linear=_packed_device_linear(config, plain, layers) or plain,
        vocabulary=plain,
        positions=plain,
    )


def _packed_device_linear(config: ModelConfig, plain: DeviceLinear, layers: DeviceLayers) -> PackedDeviceLinear | None:
    if config.quantization is None:
        return None
    from quire.quantization.packed_device import PackedDeviceLinear

    return PackedDeviceLinear(
        plain,
        weight_formats(config)[0],
        config.quantization.bits,
        converts_e4m3=layers.converts_e4m3,
        rounds_activations=layers.rounds_activations,
    )


def _check_room(config: ModelConfig, files: WeightFiles) -> LoadableModel:
    model = outline(config)
    reason = excess(config, model, files)
    if reason is not None:
        _load_from(model, files, config, _silent, (), {})  # usually loading fails with a more precise message
        raise ModelLoadError(f"{files.directory}: {reason}")
    return model


def _load_from(
    model: LoadableModel,
    files: WeightFiles | GGUFWeights,
    config: ModelConfig,
    report: Progress,
    elsewhere: Collection[str],
    cache_scales: Mapping[int, CacheScale],
) -> None:
    quantization = config.quantization
    with _named_errors(files):
        if isinstance(files, GGUFWeights):  # the file, not config.json, names each matrix's format
            model.load_weights(files.stream(report, elsewhere))
            return
        tensors = load_cache_scales(checkpoint_tensors(files, config, report), cache_scales, config, files.directory)
        if quantization is None or quantization.checkpoint_format is None:
            model.load_weights(tensors, elsewhere)
        else:
            model.load_weights(quantized_weights(whole_tensors(tensors), quantization), elsewhere)


@contextmanager
def _named_errors(files: WeightFiles | GGUFWeights) -> Iterator[None]:
    try:
        yield
    except ModelLoadError as error:
        where = files.current or files.directory
        message = error.message if str(where) in error.message else f"{where}: {error.message}"
        raise ModelLoadError(message) from None


def checkpoint_tensors(files: WeightFiles, config: ModelConfig, report: Progress) -> Tensors:
    """Stream of a checkpoint's language-model tensors under the model's names, for `load_weights`."""
    tensors = files.stream(report)
    if config.is_multimodal:
        tensors = language_tensors(tensors, files.directory, ARCHITECTURES[config.architecture].draft_prefix)
    return as_embedding(tensors, files.head_holds) if files.head_holds else tensors


def dummy_weights(
    slots: WeightSlots, seed: int, report: Progress, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Random weights (`--load-format dummy`) that depend only on the seed, the tensor's name and the device type."""
    sizes = {name: 4 * torch.Size(slot.shape).numel() for name, slot in slots.items()}
    done, total = 0, sum(sizes.values())
    for name, slot in slots.items():
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
        drawn = torch.empty(slot.shape, device=device)
        yield name, drawn.normal_(slot.dummy_mean, slot.dummy_std, generator=generator)
        done += sizes[name]
        report(done, total)


def _silent(done: int, total: int) -> None:
    """Progress callback that reports nothing."""
