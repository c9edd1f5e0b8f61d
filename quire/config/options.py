"""EngineOptions: every engine option, for Python, the command line and the wire."""

from __future__ import annotations

from typing import Annotated, Any, Protocol

import msgspec

from quire import envs
from quire.config.cache import SNAPSHOT_INTERVAL
from quire.config.media import CACHE_GIB
from quire.config.option import (
    ADAPTERS,
    ANSWERS,
    DEVICE,
    FIRST,
    IMAGES,
    KV,
    MODEL,
    OBSERVE,
    SCHEDULING,
    options_of,
)
from quire.config.scheduler import PRIORITY_SECONDS
from quire.config.vllm import translate_keywords
from quire.errors import ConfigError, nearest_name
from quire.logging import get_logger
from quire.logits_processors import name_of
from quire.sampling_params import MAX_LOGPROBS
from quire.utils.sizes import parse_count, parse_length

logger = get_logger(__name__)

BUNDLED_MODEL, BUNDLED_SIGHTS = "bundled", "bundled-sights"
"""Bundled models: one completes Python, the other answers questions about pictures."""
OUTPUT_WINDOW = 0.008
"""Default of `output_window`, in seconds."""


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engine options, with vLLM's names and meanings where it has them. Each field's `Option` describes its flag."""

    model: Annotated[
        str,
        FIRST("directory in Hugging Face layout, GGUF file, hub id, 'bundled', or 'bundled-sights' (pictures)", "-hf"),
    ] = BUNDLED_MODEL
    runner: Annotated[str, MODEL("generate, pooling (vectors of texts), or auto: as the model is made")] = "auto"
    tokenizer: Annotated[
        str | None, MODEL("directory, GGUF file or hub id of the tokenizer (default: the model's)")
    ] = None
    tokenizer_revision: Annotated[
        str | None, MODEL("branch, tag or commit of the tokenizer's hub id (default: revision, for the model's own)")
    ] = None
    chat_template: Annotated[
        str | None, MODEL("file of a chat template, or the template itself, in place of the model's")
    ] = None
    skip_tokenizer_init: Annotated[
        bool, MODEL("run without a tokenizer: prompts are token ids, outputs have no text")
    ] = False
    dtype: Annotated[str, MODEL("of the weights: auto (as stored), float32, bfloat16 or float16")] = "auto"
    device: Annotated[str, DEVICE("auto (cuda where torch and the driver have it), cpu or cuda")] = "auto"
    seed: Annotated[int, ANSWERS("seed of the engine: draws the seeds of requests that bring none")] = 0
    load_format: Annotated[str, MODEL("auto, safetensors, pt, gguf, or dummy (random weights)")] = "auto"
    model_impl: Annotated[
        str,
        MODEL("auto, quire (its own model code), or transformers (the library's code with Quire's kernels; slower)"),
    ] = "auto"
    load_draft_head: Annotated[
        bool, MODEL("load the head for drafts of a checkpoint that has one, also where it makes none")
    ] = False
    language_model_only: Annotated[
        bool, IMAGES("take text alone: of a model that takes images no vision tower is loaded")
    ] = False
    limit_mm_per_prompt: Annotated[
        dict[str, Any] | None,
        IMAGES("JSON object of most inputs of a prompt: {'image': 4}, or count, width, height (0: text alone)"),
    ] = None
    mm_processor_kwargs: Annotated[
        dict[str, Any] | None, IMAGES("JSON object: min_pixels and max_pixels of a picture after it is resized")
    ] = None
    media_io_kwargs: Annotated[
        dict[str, Any] | None,
        IMAGES("JSON object: image.rgba_background_color, which transparent pictures are laid over"),
    ] = None
    mm_processor_cache_gb: Annotated[float, IMAGES("GiB of processed pictures that a front end keeps (1)")] = CACHE_GIB
    allowed_media_domains: Annotated[
        list[str] | None,
        IMAGES("hosts that URLs of pictures may name (default: none); addresses if they are not public"),
    ] = None
    allowed_local_media_path: Annotated[
        str, IMAGES("directory of pictures that file URLs may name (default: none)")
    ] = ""
    enable_mm_embeds: Annotated[
        bool, IMAGES("take features that clients computed of images (image_embeds): of trusted clients alone")
    ] = False
    mmproj: Annotated[
        str | None,
        IMAGES("GGUF file of a GGUF model's vision tower (default: *mmproj*.gguf beside the model)"),
    ] = None
    revision: Annotated[str | None, MODEL("branch, tag or commit of a hub id")] = None
    download_dir: Annotated[
        str | None, MODEL("directory that hub ids are fetched into (default: the hub library's cache)")
    ] = None
    hf_overrides: Annotated[
        dict[str, Any] | None, MODEL("JSON object whose keys replace those of config.json before it is read")
    ] = None
    generation_config: Annotated[
        str, MODEL("defaults of sampling: auto (the model's generation_config.json), vllm (none), or a directory")
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any] | None, MODEL("JSON object whose keys replace those of generation_config.json")
    ] = None
    max_logprobs: Annotated[
        int, ANSWERS("most alternatives of a token that a request may ask for (-1: the vocabulary)")
    ] = MAX_LOGPROBS
    logprobs_mode: Annotated[
        str, ANSWERS("raw_logprobs (the model's), processed_logprobs (as drawn from), raw_logits or processed_logits")
    ] = "raw_logprobs"
    structured_outputs_config: Annotated[
        dict[str, Any] | None, ANSWERS("JSON object of settings for every constraint, such as disable_any_whitespace")
    ] = None
    speculative_config: Annotated[
        dict[str, Any] | None,
        SCHEDULING("JSON object of drafts: method or model, num_speculative_tokens, more (docs/speculation.md)"),
    ] = None
    enable_lora: Annotated[bool, ADAPTERS("let requests have adapters of low rank (docs/adapters.md)")] = False
    max_loras: Annotated[int, ADAPTERS("adapters whose requests run at a time")] = 1
    max_lora_rank: Annotated[int, ADAPTERS("largest rank of an adapter: 1, 8, 16, 32, 64, 128, 256, 320 or 512")] = 16
    max_cpu_loras: Annotated[int | None, ADAPTERS("adapters that stay loaded (default: max_loras)")] = None
    lora_dtype: Annotated[
        str, ADAPTERS("of the adapters' matrices: auto (the model's), float32, bfloat16 or float16")
    ] = "auto"
    lora_target_modules: Annotated[
        list[str] | None, ADAPTERS("names of the modules that adapters may change (default: any)")
    ] = None
    logits_processors: Annotated[
        list[str] | None, ANSWERS("classes that change logits, module:Class each (docs/logits-processors.md)")
    ] = None
    quantization: Annotated[
        str | None,
        MODEL("int8, int4, w8a8, w4a8, fp8, mxfp4: quantise while loading (default: what the checkpoint brings)"),
    ] = None
    max_model_len: Annotated[
        int | None,
        FIRST("most tokens of one sequence, such as 4096, 4k or auto (default: the model's limit)", reads=parse_length),
    ] = None
    block_size: Annotated[int, KV("tokens per KV block")] = 16
    max_num_seqs: Annotated[
        int | None,
        FIRST(
            "most sequences that run at once (default: 128; 256 on cuda; at most max_num_batched_tokens)",
            reads=parse_count,
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        SCHEDULING(
            "most tokens computed in one step (default: 2048; 8192 on cuda; at least max_num_seqs)", reads=parse_count
        ),
    ] = None
    max_prefill_chunk: Annotated[int | None, SCHEDULING("most tokens of one sequence in one step")] = None
    queue_depth: Annotated[
        int | None,
        SCHEDULING("steps in flight: 1 synchronous, 2 plans the next while one runs (default: 1; 2 on cuda)"),
    ] = None
    scheduling_policy: Annotated[
        str, SCHEDULING("fcfs (first come, first served) or priority (order by the requests' priority and age)")
    ] = "fcfs"
    priority_seconds: Annotated[
        float, SCHEDULING("seconds of waiting that one level of a request's priority is worth")
    ] = PRIORITY_SECONDS
    kv_cache_memory: Annotated[
        int | str | None, FIRST("memory of the KV cache (of all replicas), such as 4GiB (default: from what is free)")
    ] = None
    gpu_memory_utilization: Annotated[
        float | None, FIRST("cuda: share of its memory for everything (0.9); CPU: share of free memory for KV (0.5)")
    ] = None
    num_blocks_override: Annotated[int | None, KV("exactly this many KV blocks (of each replica)")] = None
    prefault_kv_cache: Annotated[
        bool, KV("write to all KV memory at the start: no prompt waits for it (CPU; cuda always has it)")
    ] = False
    enable_prefix_caching: Annotated[bool, KV("reuse the KV blocks of equal prefixes")] = True
    state_snapshot_interval: Annotated[
        int, KV("tokens between cached states of recurrent layers, rounded up to whole blocks")
    ] = SNAPSHOT_INTERVAL
    preemption_mode: Annotated[
        str, KV("what happens to a preempted request: recompute, swap (to host memory), or auto (the cheaper)")
    ] = "recompute"
    swap_space: Annotated[
        int | float | str | None,
        KV("host memory for swapped requests and offloaded blocks (default where it is used: 4GiB, if free)"),
    ] = None
    kv_offload_dir: Annotated[
        str | None, KV("directory that keeps cached KV blocks for this and later engines (default: none)")
    ] = None
    kv_offload_size: Annotated[
        int | str | None, KV("what that directory may hold, such as 50GiB (default with kv_offload_dir: 16GiB)")
    ] = None
    tensor_parallel_size: Annotated[int, DEVICE("processes that share each layer (more than 1: on a CPU)", "-tp")] = 1
    pipeline_parallel_size: Annotated[
        int, DEVICE("stages of processes that share out the layers (more than 1: on a CPU)", "-pp")
    ] = 1
    data_parallel_size: Annotated[
        int, DEVICE("engines of a server or AsyncLLM that share out requests, cores and memory (CPU)", "-dp")
    ] = 1
    decode_context_parallel_size: Annotated[
        int, DEVICE("ranks of tensor_parallel_size with the same keys that share a context's tokens (1)", "-dcp")
    ] = 1
    prefill_context_parallel_size: Annotated[
        int, DEVICE("groups of those ranks that share the tokens of prompts (more than 1: on a CPU)", "-pcp")
    ] = 1
    cp_kv_cache_interleave_size: Annotated[int, DEVICE("tokens in a row that one of those ranks keeps (1)")] = 1
    enable_expert_parallel: Annotated[
        bool, DEVICE("deal whole experts to all ranks of all replicas (default: a slice of each)", "-ep")
    ] = False
    expert_placement_strategy: Annotated[
        str, DEVICE("linear (neighbouring experts on one rank) or round_robin (they take turns)")
    ] = "linear"
    enable_eplb: Annotated[
        bool, DEVICE("move and copy experts between ranks of enable_expert_parallel, by the rows that they compute")
    ] = False
    eplb_config: Annotated[
        dict[str, Any] | None,
        DEVICE("JSON object: num_redundant_experts (0), window_size (1000) and step_interval (3000) of enable_eplb"),
    ] = None
    distributed_executor_backend: Annotated[
        str, DEVICE("where ranks run: auto, uni (engine), mp (processes), ray or external_launcher")
    ] = "auto"
    ray_placement: Annotated[
        str, DEVICE("pack (ranks on few of Ray's nodes) or strict_spread (each on a node of its own)")
    ] = "pack"
    attention_backend: Annotated[
        str, DEVICE("auto, native (CPU kernels for the whole model), torch (plain operators) or triton (cuda)")
    ] = "auto"
    kv_cache_dtype: Annotated[
        str, KV("auto (dtype; on a CPU GGUF: bfloat16, float16: float32), float32, bfloat16, float16, int8, fp8")
    ] = "auto"
    mla_prompt: Annotated[
        str,
        DEVICE("latent attention of prompts: absorbed, expanded (the batch may change bits), auto (cuda: expanded)"),
    ] = "auto"
    matmul_precision: Annotated[
        str, DEVICE("auto, float32, bfloat16 (AVX512-BF16, AMX), fp8 (a GPU: activations rounded like FP8 weights)")
    ] = "auto"
    activation_bits: Annotated[
        str, DEVICE("auto, 8, 16 or 32: what activations keep as they meet integers and 4-bit floats on a CPU")
    ] = "auto"
    num_threads: Annotated[
        int | None,
        DEVICE(
            "compute threads of a process (default: cores, or the CPU quota, shared by all ranks and replicas)",
            "--threads",
        ),
    ] = None
    enforce_eager: Annotated[bool, DEVICE("no CUDA graphs: the same as cuda_graphs none")] = False
    cuda_graphs: Annotated[
        str, DEVICE("auto (on cuda: full_and_piecewise), none, full, piecewise or full_and_piecewise")
    ] = "auto"
    cuda_graph_sizes: Annotated[
        list[int] | None, DEVICE("numbers of tokens that CUDA graphs are captured for (default: a ladder up to 1024)")
    ] = None
    batch_invariant: Annotated[
        bool, DEVICE("cuda: a request's bits depend on its own tokens alone (slower; CPUs do it always)")
    ] = False
    expert_counts: Annotated[bool, OBSERVE("count how many tokens each expert computes, for LLM.stats()")] = False
    output_window: Annotated[
        float,
        SCHEDULING("most seconds that tokens of short steps wait to be sent together (below 8 sequences a quarter)"),
    ] = OUTPUT_WINDOW
    step_log: Annotated[
        str | None, OBSERVE("file for one JSON line a step: what it computed and how long it took (default: none)")
    ] = None

    @classmethod
    def from_keywords(cls, keywords: dict[str, object]) -> EngineOptions:
        """Options of keyword arguments with our names or vLLM's (quire/config/vllm/). Logs vLLM's names without effect.
        Raises ConfigError for unknown names, wrong types and refused values."""
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
        for name, option in options_of(cls).items():
            if option.reads is not None and isinstance(values.get(name), int | str):
                values[name] = option.reads(values[name], param=name)
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"engine option: {error}") from None


_TEXTS = ("model", "tokenizer", "kv_offload_dir", "step_log", "download_dir", "activation_bits")


class HasOptions(Protocol):
    """Object that gathers engine keywords, such as `quire.EngineArgs`."""

    def to_options(self) -> EngineOptions: ...
