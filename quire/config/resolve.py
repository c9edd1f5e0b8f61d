"""Resolution of options to a configuration: all checks, and all defaults that depend on other options."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from quire import envs
from quire.config.adapters import NO_ADAPTERS, AdaptersConfig, adapters_config
from quire.config.cache import CacheConfig
from quire.config.checks import choice, positive
from quire.config.device import (
    BETWEEN_HOSTS,
    NATIVE_HEAD_LIMIT,
    NATIVE_HEAD_MULTIPLE,
    WITHIN_HOST,
    DeviceConfig,
    has_native_kernels,
    why_no_index,
    why_no_latents,
)
from quire.config.draft_model import with_draft_model
from quire.config.eagle import with_verifier
from quire.config.engine import EngineConfig
from quire.config.hf_config import ModelChoices, load_model_config, stored_dtype
from quire.config.load import LoadConfig
from quire.config.media import MediaConfig
from quire.config.mla_prompt import expands_prompts
from quire.config.model import CACHE_DTYPE_BYTES, ModelConfig
from quire.config.options import EngineOptions
from quire.config.parallel import (
    RAY_PLACEMENTS,
    check_experts_shared,
    check_prompts_dealt,
    check_ranks_available,
    check_ranks_fit,
    check_replicas,
    check_stages_fit,
    check_tokens_dealt,
    choose_executor,
    expert_balance,
    expert_placement,
    parallel_config,
)
from quire.config.pooling import RUNNERS
from quire.config.quantization import ROUNDED, QuantizationConfig
from quire.config.resolve_device import (
    BACKENDS,
    check_batch_invariant,
    choose_device,
    device_precision,
    graph_options,
    triton_model,
)
from quire.config.scheduler import SchedulerConfig
from quire.config.speculation import SpeculationConfig
from quire.config.speculation_keys import OPTION as SPECULATION
from quire.config.structured_outputs import StructuredOutputsConfig
from quire.config.vision import check_whole_images, with_entrance
from quire.errors import ConfigError
from quire.utils.control_groups import usable_cores
from quire.utils.sizes import parse_bytes

LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "dummy")
DTYPES = ("auto", "float32", "bfloat16", "float16")
CACHE_DTYPES = {
    "native": ("auto", "float32", "bfloat16", "int8", "fp8"),
    "torch": ("auto", "float32", "bfloat16", "float16", "fp8"),
    "triton": ("auto", "float32", "bfloat16", "float16", "int8", "fp8"),
}
"""Attention back end -> dtypes of its keys and values (a separate message refuses int8 on devices)."""
CACHE_ALIASES = {"fp8_e4m3": "fp8"}
GGUF_ACTIVATION_BITS = 8
ACTIVATION_BITS = ("auto", "8", "16", "32")
MATMUL_PRECISIONS = ("auto", "float32", "bfloat16", "float16", "fp8")
QUANTIZATIONS: dict[str, int | None] = {
    "int8": None,
    "int4": 32,
    "w8a8": None,
    "w4a8": 32,
    "fp8": None,
    "mxfp4": 32,
}
"""Quantisations while loading -> input features that share a scale (None: all)."""
STORED_NAMES = {
    "gptq": ("gptq",),
    "gptq_v2": ("gptq",),
    "awq": ("awq",),
    "pack-quantized": ("compressed-tensors",),
    "int-quantized": ("compressed-tensors",),
    "fp8": ("compressed-tensors", "modelopt"),
    "nvfp4": ("modelopt",),
    "nvfp4-pack-quantized": ("compressed-tensors",),
    "mxfp4-pack-quantized": ("compressed-tensors",),
}
STORED_QUANTIZATIONS = ("gptq", "awq", "compressed-tensors", "modelopt", "nvfp4")
CACHE_OPTIONS = ("kv_cache_memory", "num_blocks_override", "swap_space", "kv_offload_dir")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
PREEMPTION_MODES = ("recompute", "swap", "auto")
SCHEDULING_POLICIES = ("priority", "fcfs")
DEFAULT_OFFLOAD_SIZE = 16 * 2**30
MAX_BLOCK_SIZE = 1024
MAX_GIBIBYTES = 2**30
MAX_PRIORITY_SECONDS = 1e6
MAX_OUTPUT_WINDOW = 1.0


@dataclass(frozen=True)
class Defaults:
    max_num_seqs: int
    max_num_batched_tokens: int
    memory_utilization: float
    queue_depth: int
    max_prefill_chunk: int | None = None


MAX_NUM_SEQS = 65536
THREADS_ALLOWED_PER_CORE, LEAST_THREADS_ALLOWED = 4, 256
"""A process's threads are refused above the larger of both limits."""
STAGED_TOKENS, STAGED_CHUNK = 512, 256
"""Token budget of a step with pipeline stages, and one prompt's most in it: cut prompts keep all stages busy."""
CPU_DEFAULTS = Defaults(max_num_seqs=128, max_num_batched_tokens=2048, memory_utilization=0.5, queue_depth=1)
DEVICE_DEFAULTS = Defaults(max_num_seqs=256, max_num_batched_tokens=8192, memory_utilization=0.9, queue_depth=2)


def resolve(options: EngineOptions) -> EngineConfig:
    """Check and complete `options`, first for each engine, also by `quire plan` and `doctor`. Reads config.json
    (fetching a hub id if necessary), loads no weights."""
    parallel = parallel_config(options)
    device, is_accelerated = choose_device(options)
    if parallel.num_devices > 1:
        check_ranks_available(options, is_accelerated)
    check_replicas(options, is_accelerated)
    options = with_verifier(options)
    speculation = SpeculationConfig.of(options.speculative_config)
    if speculation.method == "mtp":
        options = msgspec.structs.replace(options, load_draft_head=True)
    backend, model = _completed(options, is_accelerated)
    if parallel.num_devices > 1:
        check_ranks_fit(options, model)
    _check_pooling(options, model)
    speculation = _speculation(speculation, options, model, backend, is_accelerated)
    check_tokens_dealt(options, model, backend)
    check_prompts_dealt(options, model, speculation, backend)
    check_experts_shared(options, model, speculation, backend)
    if speculation.max_drafts:
        model = replace(model, shape=model.shape.with_spare_inputs(speculation.max_drafts))
    media = _media(options)
    defaults = DEVICE_DEFAULTS if is_accelerated else CPU_DEFAULTS
    if parallel.pp > 1:
        check_stages_fit(options, speculation)
        model = model if media.language_model_only else with_entrance(model, parallel.pp)
        defaults = replace(
            defaults, max_num_batched_tokens=STAGED_TOKENS, queue_depth=parallel.pp, max_prefill_chunk=STAGED_CHUNK
        )
    scheduler = _scheduler(options, defaults, model)
    cuda_graphs, cuda_graph_sizes = graph_options(options, scheduler, device, model)
    config = EngineConfig(
        model=model,
        cache=_cache(options, defaults, model),
        scheduler=scheduler,
        load=LoadConfig(
            load_format=choice("load_format", options.load_format, LOAD_FORMATS),
            seed=options.seed & (2**63 - 1),
            counts_experts=_counts_experts(options, model) or options.enable_eplb,
            expert_placement=expert_placement(options, model),
            balance=expert_balance(options, model),
            dealt_to=parallel.dcp,
        ),
        device=DeviceConfig(
            device=device,
            num_threads=_num_threads(options)
            or max(1, usable_cores() // (parallel.num_devices * options.data_parallel_size)),
            attention_backend=backend,
            cpu_isa=envs.cpu_isa(),
            matmul_precision=_matmul_precision(options, model, backend, device),
            cuda_graphs=cuda_graphs,
            cuda_graph_sizes=cuda_graph_sizes,
            batch_invariant=check_batch_invariant(options, device) if is_accelerated else True,
            platform="cuda" if is_accelerated else "cpu",
            collectives=WITHIN_HOST if backend == "native" else BETWEEN_HOSTS,
        ),
        seed=options.seed,
        max_logprobs=_max_logprobs(options),
        logprobs_mode=choice("logprobs_mode", options.logprobs_mode, LOGPROBS_MODES),
        output_window=_output_window(options),
        step_log=None if options.step_log is None else Path(options.step_log).expanduser(),
        parallel=parallel,
        executor=choose_executor(options, parallel, is_accelerated),
        ray_placement=choice("ray_placement", options.ray_placement, RAY_PLACEMENTS),
        speculation=speculation,
        adapters=_adapters(options, model),
        logits_processors=tuple(options.logits_processors or ()),
        structured_outputs=StructuredOutputsConfig.of(options.structured_outputs_config or {}),
        media=media,
    )
    check_whole_images(config)
    return config


def _media(options: EngineOptions) -> MediaConfig:
    return MediaConfig.of(
        language_model_only=options.language_model_only,
        limit_mm_per_prompt=options.limit_mm_per_prompt or {},
        mm_processor_kwargs=options.mm_processor_kwargs or {},
        media_io_kwargs=options.media_io_kwargs or {},
        mm_processor_cache_gb=options.mm_processor_cache_gb,
        allowed_media_domains=options.allowed_media_domains or [],
        allowed_local_media_path=options.allowed_local_media_path,
        enable_mm_embeds=options.enable_mm_embeds,
    )


def _adapters(options: EngineOptions, model: ModelConfig) -> AdaptersConfig:
    given = options.max_loras, options.max_lora_rank, options.max_cpu_loras, options.lora_dtype
    found = adapters_config(*given, options.lora_target_modules, model.dtype)
    if not options.enable_lora:
        return NO_ADAPTERS
    reasons = {
        "models that run through Transformers": model.impl != "quire",
    }
    for what, is_so in reasons.items():
        if is_so:
            raise ConfigError(f"enable_lora is not possible with {what} yet", param="enable_lora")
    return found


def _completed(options: EngineOptions, is_accelerated: bool) -> tuple[str, ModelConfig]:
    """Attention back end, and the model with all options on its computation."""
    backend, model = _backend_and_model(options, is_accelerated)
    model = replace(model, quantization=_quantization(options, model, backend))
    model = replace(model, activation_bits=_activation_bits(options, model, backend))
    is_invariant = options.batch_invariant or not is_accelerated
    attention = model.shape.attention if model.impl == "quire" else None
    expands = expands_prompts(options, attention, model.architecture, is_invariant=is_invariant)
    return backend, replace(model, expands_prompts=expands)


def _speculation(
    speculation: SpeculationConfig, options: EngineOptions, model: ModelConfig, backend: str, is_accelerated: bool
) -> SpeculationConfig:
    if speculation.max_drafts and model.pooling is not None:
        raise ConfigError(
            f"{SPECULATION} is of models that generate; {model.name} makes vectors of texts", param=SPECULATION
        )
    method = speculation.method
    if method == "mtp" and not model.shape.draft_layers:
        raise ConfigError(
            f"{SPECULATION}.method 'mtp' is of checkpoints with a head for drafts, and {model.name} has none that is "
            "known here",
            param=SPECULATION,
        )
    return with_draft_model(speculation, options, model, backend, lambda own: _completed(own, is_accelerated)[1])


def _backend_and_model(options: EngineOptions, is_accelerated: bool) -> tuple[str, ModelConfig]:
    """Attention back end, and the model, whose dtypes depend on it. On a CPU "auto" is the native back end if it
    can compute the model."""
    asked = "triton" if is_accelerated else choice("attention_backend", options.attention_backend, BACKENDS)
    dtype = choice("dtype", options.dtype, DTYPES)
    if options.kv_cache_dtype == "fp8_e5m2":
        raise ConfigError(
            "kv_cache_dtype='fp8_e5m2' is not supported: 'fp8' (e4m3) has the same size and a digit more",
            param="kv_cache_dtype",
        )
    cache = CACHE_ALIASES.get(options.kv_cache_dtype, options.kv_cache_dtype)
    choice("kv_cache_dtype", cache, CACHE_DTYPES.get(asked, CACHE_DTYPES["native"]))
    model = load_model_config(
        options.model,
        dtype=dtype,
        kv_cache_dtype=cache,
        max_model_len=positive("max_model_len", options.max_model_len),
        revision=options.revision,
        config_only=options.load_format == "dummy",
        choices=ModelChoices(
            runner=choice("runner", options.runner, RUNNERS),
            model_impl=options.model_impl,
            load_draft_head=options.load_draft_head,
            download_dir=options.download_dir,
            hf_overrides=options.hf_overrides,
            generation_config=options.generation_config,
            override_generation_config=options.override_generation_config,
            mmproj=options.mmproj,
        ),
    )
    if is_accelerated:
        return "triton", triton_model(options, model)
    if CACHE_DTYPE_BYTES.get(cache) == 1 and model.shape.attention.kind == "latent":
        raise ConfigError(
            f"kv_cache_dtype={cache!r} is not available for latent attention yet: choose auto, float32 or bfloat16",
            param="kv_cache_dtype",
        )
    reason = _why_not_native(model)
    if asked == "native" and reason:
        raise ConfigError(f"attention_backend='native' is not possible: {reason}", param="attention_backend")
    if asked != "torch" and not reason:
        return "native", model
    choice("kv_cache_dtype", cache, CACHE_DTYPES["torch"])
    # Plain operators are slow and imprecise in 16 bits; the native kernels only store in them.
    plain = "float32" if dtype == "auto" else model.dtype
    return "torch", replace(model, dtype=plain, kv_cache_dtype=plain if cache == "auto" else cache)


def _matmul_precision(options: EngineOptions, model: ModelConfig, backend: str, device: str) -> str:
    """Value of `DeviceConfig.matmul_precision`. By "auto" activations are rounded only for weights stored in bfloat16,
    and for GGUF files."""
    asked = choice("matmul_precision", options.matmul_precision, MATMUL_PRECISIONS)
    if backend == "triton":
        return device_precision(asked, model, device)
    if asked in ("float16", "fp8"):
        raise ConfigError(
            f"matmul_precision={asked!r} is not possible: products in it are a GPU's", param="matmul_precision"
        )
    if backend != "native":
        if asked not in ("auto", model.dtype):
            raise ConfigError(
                f"matmul_precision={asked!r} is not possible: {backend} multiplies in the dtype of the weights, "
                f"{model.dtype}",
                param="matmul_precision",
            )
        return model.dtype
    concerned = (model.dtype, model.kv_cache_dtype)
    if asked == "bfloat16" and "bfloat16" not in concerned and model.quantization is None and not model.is_gguf:
        raise ConfigError(
            f"matmul_precision='bfloat16' would change nothing: weights are {model.dtype} and the KV cache is "
            f"{model.kv_cache_dtype}",
            param="matmul_precision",
        )
    if asked == "auto" and not model.is_gguf and (model.dtype, stored_dtype(model.hf)) != ("bfloat16", "bfloat16"):
        return "float32"
    return asked


def _quantization(options: EngineOptions, model: ModelConfig, backend: str) -> QuantizationConfig | None:
    """Quantisation from the checkpoint and the option, which may add that activations are rounded too."""
    asked, stored = options.quantization, model.quantization
    if asked is None:
        return stored
    choice("quantization", asked, (*QUANTIZATIONS, *STORED_QUANTIZATIONS))
    if stored is not None:
        if stored.is_integer and asked == ROUNDED[stored.bits] and backend != "torch":
            return replace(stored, method=asked)
        if asked not in (stored.method, *STORED_NAMES.get(stored.checkpoint_format or "", ())):
            raise ConfigError(
                f"quantization={asked!r} is not what the checkpoint brings: "
                f"{stored.method} ({stored.checkpoint_format})",
                param="quantization",
            )
        return stored
    if asked not in QUANTIZATIONS:
        raise ConfigError(
            f"quantization={asked!r} names a kind of checkpoint, and this one is not quantised; to quantise it while "
            f"it is loaded, choose {', '.join(QUANTIZATIONS)}",
            param="quantization",
        )
    if backend == "torch":
        raise ConfigError(
            f"quantization={asked!r} needs the native CPU kernels: {_why_not_native(model) or 'torch was chosen'}",
            param="quantization",
        )
    return QuantizationConfig(method=asked, group_size=QUANTIZATIONS[asked])


def _activation_bits(options: EngineOptions, model: ModelConfig, backend: str) -> int:
    """Value of `ModelConfig.activation_bits`. By "auto" it is 8 for a GGUF file on the native kernels without a dtype
    or matmul precision."""
    asked = choice("activation_bits", options.activation_bits, ACTIVATION_BITS)
    if asked == "auto":
        is_free = model.is_gguf and model.quantization is None and backend == "native"
        return GGUF_ACTIVATION_BITS if is_free and options.dtype == options.matmul_precision == "auto" else 0
    reason = None
    if backend != "native":
        reason = f"they are bits that the native CPU kernels keep, and {backend} computes the model"
    elif model.quantization is None and not model.is_gguf:
        reason = "weights are floating point, which matmul_precision is about"
    elif model.quantization is not None and model.quantization.method == "fp8":
        reason = "FP8 weights are multiplied in float32 or bfloat16, which matmul_precision is about"
    elif model.quantization is not None and model.quantization.rounds_activations:
        reason = f"quantization={model.quantization.method!r} rounds activations by itself"
    if reason is not None:
        raise ConfigError(f"activation_bits={asked} is not possible: {reason}", param="activation_bits")
    return int(asked)


def _counts_experts(options: EngineOptions, model: ModelConfig) -> bool:
    if options.expert_counts and (model.impl != "quire" or model.shape.experts is None):
        why = (
            "has no experts" if model.shape.experts is None else "runs through Transformers, where experts do not count"
        )
        raise ConfigError(f"expert_counts is not possible: {model.architecture} {why}", param="expert_counts")
    return options.expert_counts


def _why_not_native(model: ModelConfig) -> str | None:
    if not has_native_kernels():
        return "this installation was built without the native CPU kernels"
    attention = model.shape.attention
    if attention.kind == "latent":
        return why_no_latents(attention.latent_rank, attention.rotated_dim) or why_no_index(
            attention.index_heads, attention.index_dim, attention.index_top
        )
    if model.head_dim % NATIVE_HEAD_MULTIPLE or model.head_dim > NATIVE_HEAD_LIMIT:
        return (
            f"heads of {model.head_dim} are no multiple of {NATIVE_HEAD_MULTIPLE} up to {NATIVE_HEAD_LIMIT}, as its "
            "kernels need"
        )
    return None


def _max_logprobs(options: EngineOptions) -> int:
    if options.max_logprobs < -1:
        raise ConfigError(
            f"max_logprobs must be positive, 0, or -1 for the vocabulary, not {options.max_logprobs}",
            param="max_logprobs",
        )
    return options.max_logprobs


def _check_pooling(options: EngineOptions, model: ModelConfig) -> None:
    """Raise ConfigError for options that a model without a KV cache, or one that takes whole prompts, would ignore."""
    if model.takes_whole_prompts and options.max_prefill_chunk is not None:
        raise ConfigError(
            f"max_prefill_chunk cuts prompts into parts, and {model.architecture} computes them whole here",
            param="max_prefill_chunk",
        )
    if model.takes_whole_prompts and options.kv_offload_dir is not None:
        raise ConfigError(
            f"kv_offload_dir keeps the prefix cache, and {model.architecture} has none here", param="kv_offload_dir"
        )
    if not model.is_encoder:
        return
    for name in CACHE_OPTIONS:
        if getattr(options, name) is not None:
            raise ConfigError(f"{name} is for a KV cache, and {model.architecture} keeps none", param=name)
    if options.preemption_mode != "recompute":
        raise ConfigError(
            f"preemption_mode={options.preemption_mode!r} moves a KV cache, and {model.architecture} keeps none",
            param="preemption_mode",
        )


def _cache(options: EngineOptions, defaults: Defaults, model: ModelConfig) -> CacheConfig:
    block_size = options.block_size
    if not 1 <= block_size <= MAX_BLOCK_SIZE or block_size & (block_size - 1):
        raise ConfigError(
            f"block_size must be a power of two up to {MAX_BLOCK_SIZE}, not {block_size}", param="block_size"
        )
    positive("state_snapshot_interval", options.state_snapshot_interval)
    utilization = options.gpu_memory_utilization
    if utilization is None:
        utilization = defaults.memory_utilization
    if not 0 < utilization <= 1:
        raise ConfigError(
            f"gpu_memory_utilization must be in (0, 1], not {utilization}", param="gpu_memory_utilization"
        )
    memory, num_replicas = options.kv_cache_memory, options.data_parallel_size
    swap_space = _swap_space(options)
    return CacheConfig(
        block_size=block_size,
        memory=None if memory is None else parse_bytes(memory, param="kv_cache_memory") // num_replicas,
        memory_utilization=utilization,
        num_blocks_override=positive("num_blocks_override", options.num_blocks_override),
        enable_prefix_caching=options.enable_prefix_caching and not model.takes_whole_prompts,
        swap_space=None if swap_space is None else swap_space // num_replicas,
        offload_dir=None if options.kv_offload_dir is None else Path(options.kv_offload_dir).expanduser(),
        offload_size=_offload_size(options),
        state_snapshot_interval=options.state_snapshot_interval,
        prefault=options.prefault_kv_cache,
        num_replicas=num_replicas,
    )


def _swap_space(options: EngineOptions) -> int | None:
    space = None if options.swap_space is None else _gibibytes(options.swap_space, "swap_space")
    mode = choice("preemption_mode", options.preemption_mode, PREEMPTION_MODES)
    if mode != "recompute" or options.kv_offload_dir is not None:
        return space
    if space is not None:
        raise ConfigError(
            "swap_space is for preemption_mode='swap' or 'auto' and for kv_offload_dir; preemption_mode is "
            "'recompute', and there is no kv_offload_dir",
            param="swap_space",
        )
    return 0


def _gibibytes(size: float | str, param: str) -> int:
    """Bytes of a size; a bare number counts GiB, as in vLLM."""
    if not isinstance(size, str):
        return parse_bytes(int(size * 2**30) if size < MAX_GIBIBYTES else 0, param=param)
    return parse_bytes(f"{size}GiB" if size.strip().replace(".", "", 1).isdigit() else size, param=param)


def _offload_size(options: EngineOptions) -> int:
    size = options.kv_offload_size
    if options.kv_offload_dir is None:
        if size is not None:
            raise ConfigError("kv_offload_size is for kv_offload_dir, which is not given", param="kv_offload_size")
        return 0
    if not options.kv_offload_dir:
        raise ConfigError("kv_offload_dir must name a directory", param="kv_offload_dir")
    if not options.enable_prefix_caching:
        raise ConfigError(
            "kv_offload_dir keeps the blocks of the prefix cache, which enable_prefix_caching=False turns off",
            param="kv_offload_dir",
        )
    return DEFAULT_OFFLOAD_SIZE if size is None else parse_bytes(size, param="kv_offload_size")


def batch_limits(options: EngineOptions, usual_seqs: int, usual_budget: int) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens). A missing value follows from the other. Raises ConfigError if they
    contradict each other. usual_seqs, usual_budget: values without options."""
    seqs = positive("max_num_seqs", options.max_num_seqs)
    budget = positive("max_num_batched_tokens", options.max_num_batched_tokens)
    if seqs is None:
        seqs = usual_seqs if budget is None else min(usual_seqs, budget)
    budget = max(usual_budget, seqs) if budget is None else budget
    if budget < seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({budget}) must be at least max_num_seqs ({seqs}): each running sequence may need "
            "one token a step",
            param="max_num_batched_tokens",
        )
    return seqs, budget


def _num_threads(options: EngineOptions) -> int | None:
    wanted = positive("num_threads", options.num_threads) or envs.num_threads()
    cores = os.cpu_count() or 1
    most = max(LEAST_THREADS_ALLOWED, THREADS_ALLOWED_PER_CORE * cores)
    if wanted is not None and wanted > most:
        raise ConfigError(
            f"num_threads {wanted} is more than {most}, with {cores} cores on this machine: threads beyond the cores "
            "take turns, and make a step slower",
            param="num_threads",
        )
    return wanted


def _output_window(options: EngineOptions) -> float:
    if not 0 <= options.output_window <= MAX_OUTPUT_WINDOW:
        raise ConfigError(
            f"output_window must be from 0 to {MAX_OUTPUT_WINDOW:g} seconds, not {options.output_window}",
            param="output_window",
        )
    return options.output_window


def _scheduler(options: EngineOptions, defaults: Defaults, model: ModelConfig) -> SchedulerConfig:
    queue_depth = defaults.queue_depth if options.queue_depth is None else options.queue_depth
    most = max(2, options.pipeline_parallel_size)
    if not 1 <= queue_depth <= most:
        raise ConfigError(f"queue_depth must be from 1 to {most}, not {queue_depth}", param="queue_depth")
    longest_step, usual_chunk = defaults.max_num_batched_tokens, defaults.max_prefill_chunk
    if model.takes_whole_prompts:
        longest_step, usual_chunk = max(longest_step, model.max_model_len), None
    max_num_seqs, budget = batch_limits(options, defaults.max_num_seqs, longest_step)
    if max_num_seqs > MAX_NUM_SEQS:
        gib = max_num_seqs * model.shape.vocab * 4 / 2**30
        raise ConfigError(
            f"max_num_seqs {max_num_seqs} is more than {MAX_NUM_SEQS}: the scores of a step that samples for all would "
            f"take {gib:,.1f} GiB ({max_num_seqs} x {model.shape.vocab} float32)",
            param="max_num_seqs",
        )
    if not 0 < options.priority_seconds <= MAX_PRIORITY_SECONDS:
        raise ConfigError(
            f"priority_seconds must be in (0, {MAX_PRIORITY_SECONDS:g}], not {options.priority_seconds}",
            param="priority_seconds",
        )
    chunk = usual_chunk if options.max_prefill_chunk is None else options.max_prefill_chunk
    return SchedulerConfig(
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_prefill_chunk=positive("max_prefill_chunk", chunk),
        queue_depth=queue_depth,
        scheduling_policy=choice("scheduling_policy", options.scheduling_policy, SCHEDULING_POLICIES),
        priority_seconds=options.priority_seconds,
        preemption_mode=options.preemption_mode,
        whole_prompts=model.takes_whole_prompts,
        num_stages=options.pipeline_parallel_size,
    )
