"""EngineOptions: every engine option as the user writes it, once for Python, the command line and the wire."""

from __future__ import annotations

from typing import Any

import msgspec

from quire import envs
from quire.config.cache import SNAPSHOT_INTERVAL
from quire.config.media import CACHE_GIB
from quire.config.scheduler import PRIORITY_SECONDS
from quire.config.vllm import translate_keywords
from quire.errors import ConfigError, nearest_name
from quire.logging import get_logger
from quire.logits_processors import name_of
from quire.sampling_params import MAX_LOGPROBS
from quire.utils.sizes import parse_count, parse_length

logger = get_logger(__name__)

BUNDLED_MODEL, BUNDLED_SIGHTS = "bundled", "bundled-sights"
"""Names of the models that come with the package: one completes Python, the other answers questions about pictures."""
OUTPUT_WINDOW = 0.008
"""Seconds."""


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names and meanings are vLLM's where it has them. `HELP` holds one line for each field."""

    model: str = BUNDLED_MODEL
    runner: str = "auto"
    tokenizer: str | None = None
    tokenizer_revision: str | None = None
    chat_template: str | None = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    load_format: str = "auto"
    model_impl: str = "auto"
    load_draft_head: bool = False
    language_model_only: bool = False
    limit_mm_per_prompt: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_cache_gb: float = CACHE_GIB
    allowed_media_domains: list[str] | None = None
    allowed_local_media_path: str = ""
    revision: str | None = None
    download_dir: str | None = None
    hf_overrides: dict[str, Any] | None = None
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] | None = None
    max_logprobs: int = MAX_LOGPROBS
    logprobs_mode: str = "raw_logprobs"
    structured_outputs_config: dict[str, Any] | None = None
    speculative_config: dict[str, Any] | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_dtype: str = "auto"
    lora_target_modules: list[str] | None = None
    logits_processors: list[str] | None = None
    quantization: str | None = None
    max_model_len: int | None = None
    block_size: int = 16
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_prefill_chunk: int | None = None
    queue_depth: int | None = None
    scheduling_policy: str = "fcfs"
    priority_seconds: float = PRIORITY_SECONDS
    kv_cache_memory: int | str | None = None
    gpu_memory_utilization: float | None = None
    num_blocks_override: int | None = None
    prefault_kv_cache: bool = False
    enable_prefix_caching: bool = True
    state_snapshot_interval: int = SNAPSHOT_INTERVAL
    preemption_mode: str = "recompute"
    swap_space: int | float | str | None = None
    kv_offload_dir: str | None = None
    kv_offload_size: int | str | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    cp_kv_cache_interleave_size: int = 1
    enable_expert_parallel: bool = False
    expert_placement_strategy: str = "linear"
    distributed_executor_backend: str = "auto"
    ray_placement: str = "pack"
    attention_backend: str = "auto"
    kv_cache_dtype: str = "auto"
    mla_prompt: str = "auto"
    matmul_precision: str = "auto"
    activation_bits: str = "auto"
    num_threads: int | None = None
    enforce_eager: bool = False
    cuda_graphs: str = "auto"
    cuda_graph_sizes: list[int] | None = None
    batch_invariant: bool = False
    expert_counts: bool = False
    output_window: float = OUTPUT_WINDOW
    step_log: str | None = None

    @classmethod
    def from_keywords(cls, keywords: dict[str, object]) -> EngineOptions:
        """Build from keyword arguments, ours or vLLM's (quire/config/vllm/): what of those has no effect is logged.

        Unknown names, wrong types and what is refused raise ConfigError."""
        keywords, notes = translate_keywords(keywords, cls.__struct_fields__)
        for note in notes:
            logger.warning("%s", note)
        if isinstance(token := keywords.pop("hf_token", None), str):
            envs.use_hub_token(token)
        for name in keywords:
            if name not in cls.__struct_fields__:
                nearest = nearest_name(name, cls.__struct_fields__)
                raise ConfigError(f"unknown engine option {name!r}{nearest}", param=name)
        values = {name: str(v) if name in _TEXTS and v is not None else v for name, v in keywords.items()}
        if isinstance(processors := values.get("logits_processors"), list | tuple):
            values["logits_processors"] = [name_of(each) for each in processors]
        for name, parse in _NUMBERS.items():
            if isinstance(values.get(name), int | str):
                values[name] = parse(values[name], param=name)
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"engine option: {error}") from None


_TEXTS = ("model", "tokenizer", "kv_offload_dir", "step_log", "download_dir", "activation_bits")
_NUMBERS: dict[str, Any] = {
    "max_model_len": parse_length,
    "max_num_seqs": parse_count,
    "max_num_batched_tokens": parse_count,
}
"""Options that may be written as 4k or 4K, the first also as auto or -1, and how they are read."""

HELP: dict[str, str] = {
    "model": "directory in Hugging Face layout, GGUF file, hub id, 'bundled', or 'bundled-sights' (pictures)",
    "runner": "generate, pooling (vectors of texts), or auto: as the model is made",
    "tokenizer": "directory, GGUF file or hub id of the tokenizer (default: the model's)",
    "tokenizer_revision": "branch, tag or commit of the tokenizer's hub id (default: revision, for the model's own)",
    "chat_template": "file of a chat template, or the template itself, in place of the model's",
    "skip_tokenizer_init": "run without a tokenizer: prompts are token ids, outputs have no text",
    "dtype": "of the weights: auto (as stored), float32, bfloat16 or float16",
    "device": "auto (cuda where torch and the driver have it), cpu or cuda",
    "seed": "seed of the engine: draws the seeds of requests that bring none",
    "load_format": "auto, safetensors, pt, gguf, or dummy (random weights)",
    "model_impl": "auto, quire (its own model code), or transformers (the library's code with Quire's kernels; slower)",
    "load_draft_head": "load the head for drafts of a checkpoint that has one, also where it makes none",
    "language_model_only": "take text alone: of a model that takes images no vision tower is loaded",
    "limit_mm_per_prompt": "JSON object of most inputs of a prompt, such as {'image': 4} (0: the language model alone)",
    "mm_processor_kwargs": "JSON object: min_pixels and max_pixels of a picture after it is resized",
    "media_io_kwargs": "JSON object: image.rgba_background_color, which transparent pictures are laid over",
    "mm_processor_cache_gb": "GiB of processed pictures that a front end keeps (1)",
    "allowed_media_domains": "hosts that URLs of pictures may name (default: none); addresses if they are not public",
    "allowed_local_media_path": "directory of pictures that file URLs may name (default: none)",
    "revision": "branch, tag or commit of a hub id",
    "download_dir": "directory that hub ids are fetched into (default: the hub library's cache)",
    "hf_overrides": "JSON object whose keys replace those of config.json before it is read",
    "generation_config": "defaults of sampling: auto (the model's generation_config.json), vllm (none), or a directory",
    "override_generation_config": "JSON object whose keys replace those of generation_config.json",
    "max_logprobs": "most alternatives of a token that a request may ask for (-1: the vocabulary)",
    "logprobs_mode": "raw_logprobs (the model's), processed_logprobs (as drawn from), raw_logits or processed_logits",
    "structured_outputs_config": "JSON object of settings for every constraint, such as disable_any_whitespace",
    "enable_lora": "let requests have adapters of low rank (docs/adapters.md)",
    "max_loras": "adapters whose requests run at a time",
    "max_lora_rank": "largest rank of an adapter: 1, 8, 16, 32, 64, 128, 256, 320 or 512",
    "max_cpu_loras": "adapters that stay loaded (default: max_loras)",
    "lora_dtype": "of the adapters' matrices: auto (the model's), float32, bfloat16 or float16",
    "lora_target_modules": "names of the modules that adapters may change (default: any)",
    "logits_processors": "classes that change logits, module:Class each (docs/logits-processors.md)",
    "speculative_config": "JSON object of drafts: method or model, num_speculative_tokens, more (docs/speculation.md)",
    "quantization": "int8, int4, w8a8, w4a8, fp8, mxfp4: quantise while loading (default: what the checkpoint brings)",
    "max_model_len": "most tokens of one sequence, such as 4096, 4k or auto (default: the model's limit)",
    "block_size": "tokens per KV block",
    "max_num_seqs": "most sequences that run at once (default: 128; 256 on cuda; at most max_num_batched_tokens)",
    "max_num_batched_tokens": "most tokens computed in one step (default: 2048; 8192 on cuda; at least max_num_seqs)",
    "max_prefill_chunk": "most tokens of one sequence in one step",
    "queue_depth": "steps in flight: 1 synchronous, 2 plans the next while one runs (default: 1; 2 on cuda)",
    "scheduling_policy": "fcfs (first come, first served) or priority (order by the requests' priority and age)",
    "priority_seconds": "seconds of waiting that one level of a request's priority is worth",
    "kv_cache_memory": "memory of the KV cache (of all replicas), such as 4GiB (default: from what is free)",
    "gpu_memory_utilization": "cuda: share of its memory for everything (0.9); CPU: share of free memory for KV (0.5)",
    "num_blocks_override": "exactly this many KV blocks (of each replica)",
    "prefault_kv_cache": "write to all KV memory at the start: no prompt waits for it (CPU; cuda always has it)",
    "enable_prefix_caching": "reuse the KV blocks of equal prefixes",
    "state_snapshot_interval": "tokens between cached states of recurrent layers, rounded up to whole blocks",
    "preemption_mode": "what happens to a preempted request: recompute, swap (to host memory), or auto (the cheaper)",
    "swap_space": "host memory for swapped requests and offloaded blocks (default where it is used: 4GiB, if free)",
    "kv_offload_dir": "directory that keeps cached KV blocks for this and later engines (default: none)",
    "kv_offload_size": "what that directory may hold, such as 50GiB (default with kv_offload_dir: 16GiB)",
    "tensor_parallel_size": "processes that share each layer (more than 1: on a CPU)",
    "pipeline_parallel_size": "stages of processes that share out the layers (more than 1: on a CPU)",
    "data_parallel_size": "engines of a server or AsyncLLM that share out requests, cores and memory (CPU)",
    "decode_context_parallel_size": "ranks of tensor_parallel_size with one key head that share a context's tokens (1)",
    "cp_kv_cache_interleave_size": "tokens in a row that one of those ranks keeps (1)",
    "enable_expert_parallel": "deal whole experts to the ranks of tensor_parallel_size (default: a slice of each)",
    "expert_placement_strategy": "linear (neighbouring experts on one rank) or round_robin (they take turns)",
    "distributed_executor_backend": "where ranks run: auto, uni (engine), mp (processes), ray or external_launcher",
    "ray_placement": "pack (ranks on few of Ray's nodes) or strict_spread (each on a node of its own)",
    "attention_backend": "auto, native (CPU kernels for the whole model), torch (plain operators) or triton (cuda)",
    "kv_cache_dtype": "auto (dtype; on a CPU GGUF: bfloat16, float16: float32), float32, bfloat16, float16, int8, fp8",
    "mla_prompt": "latent attention of prompts: absorbed, expanded (the batch may change bits), auto (cuda: expanded)",
    "matmul_precision": "auto, float32, bfloat16 (AVX512-BF16, AMX), fp8 (a GPU: activations rounded like FP8 weights)",
    "activation_bits": "auto, 8, 16 or 32: what activations keep as they meet integers and 4-bit floats on a CPU",
    "num_threads": "compute threads of a process (default: cores, or the CPU quota, shared by all ranks and replicas)",
    "enforce_eager": "no CUDA graphs: the same as cuda_graphs none",
    "cuda_graphs": "auto (on cuda: full_and_piecewise), none, full, piecewise or full_and_piecewise",
    "cuda_graph_sizes": "numbers of tokens that CUDA graphs are captured for (default: a ladder up to 1024)",
    "batch_invariant": "cuda: a request's bits depend on its own tokens alone (slower; CPUs do it always)",
    "expert_counts": "count how many tokens each expert computes, for LLM.stats()",
    "output_window": "most seconds that tokens of short steps wait to be sent together (below 8 sequences a quarter)",
    "step_log": "file for one JSON line a step: what it computed and how long it took (default: none)",
}
