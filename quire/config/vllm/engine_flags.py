"""vLLM's engine flags for the model, its files and its cache, in vLLM's order."""

from __future__ import annotations

from quire.config.vllm.record import VllmFlag, noted, refused, to

DTYPE_WORDS = {"half": "float16", "float": "float32"}
TASK_WORDS = {"embed": "pooling", "embedding": "pooling", "classify": "pooling", "score": "pooling"}
METHOD_WORDS = {"awq_marlin": "awq", "gptq_marlin": "gptq", "modelopt_fp4": "modelopt", "None": None, "none": None}
FORMAT_WORDS = {
    "hf": "auto",
    "fastsafetensors": "safetensors",
    "instanttensor": "safetensors",
    "runai_streamer": "safetensors",
    "npcache": "pt",
}
OUR_BACKENDS = ("auto", "native", "torch", "triton")

NO_CODE = "no code of a checkpoint is ever run: the model is one that Quire or Transformers knows"
NO_PRUNING = "a video keeps the tokens of all sampled frames"
NO_TOWER_FP8 = "the tower is never quantised"
POOLING_IN_FILES = "how a model pools is read from its own files; a request sets normalize, dimensions, use_activation"
MAPPED = "weights are read from memory-mapped files"
STATES = "states of recurrent layers are kept in float32, at intervals of state_snapshot_interval tokens"
OFFLOAD = "host memory and disk keep cached blocks with --kv-offload-dir and --swap-space"
WEIGHTS_STAY = "weights stay where the device computes; a CPU's engine has them in host memory anyway"

MODEL: tuple[VllmFlag, ...] = (
    to("model", "text"),
    to("runner", "text"),
    refused("convert", "text", "a model pools or generates as it was made", "auto", "none"),
    to("task", "text", "runner", values=TASK_WORDS),
    to("tokenizer", "text"),
    noted("tokenizer_mode", "text", "one reader takes all kinds of tokenizer files", "auto", "hf", "slow", "mistral"),
    noted("trust_remote_code", "flag", NO_CODE, False),
    to("dtype", "text", values=DTYPE_WORDS),
    to("seed", "int"),
    refused("hf_config_path", "text", "config.json is read beside the weights; --hf-overrides changes keys of it"),
    to("allowed_local_media_path", "text"),
    to("allowed_media_domains", "texts", why="none may be named unless they are listed; addresses if not public"),
    to("revision", "text"),
    noted("code_revision", "text", NO_CODE),
    to("tokenizer_revision", "text"),
    to("max_model_len", "length", why="auto and -1: the model's limit, or less where the KV cache has no room for it"),
    to("quantization", "text", short=("-q",), values=METHOD_WORDS),
    refused(
        "quantization_config", "json", "the checkpoint says how it is quantised, or --quantization names a way", {}
    ),
    noted("allow_deprecated_quantization", "flag", "no way of quantising is deprecated here", False),
    to("enforce_eager", "flag"),
    refused("enable_return_routed_experts", "flag", "answers do not tell which experts were used", False),
    refused("return_sampling_mask", "flag", "answers do not tell which tokens could be drawn", False),
    to("max_logprobs", "int", why="-1: the whole vocabulary"),
    to("logprobs_mode", "text", why="prompt logprobs are raw in each mode"),
    noted("use_fp64_gumbel", "flag", "draws do not use Gumbel noise", False),
    noted("enable_trace_replay", "flag", "steps are logged with --step-log", False),
    refused("disable_sliding_window", "flag", "give --max-model-len the window's size instead", False),
    noted("disable_cascade_attn", "flag", "there is no cascade attention", False, True),
    to("skip_tokenizer_init", "flag"),
    refused("enable_prompt_embeds", "flag", "prompts are texts or token ids", False),
    to("served_model_name", "texts", is_keyword=False),
    refused("config_format", "text", "config.json and GGUF files are read, Mistral's params.json is not", "auto", "hf"),
    to("hf_token", "any", why="used for downloads as HF_TOKEN is"),
    to("hf_overrides", "json"),
    refused("model_class_overrides", "json", NO_CODE, {}),
    refused("pooler_config", "json", POOLING_IN_FILES, {}),
    refused("override_pooler_config", "json", POOLING_IN_FILES, {}),
    to("generation_config", "text"),
    to("override_generation_config", "json"),
    to("enable_sleep_mode", "flag", is_keyword=False),
    noted("sleep_mode_offload_cudagraph", "flag", "graphs stay, or are captured again", False),
    noted("sleep_mode_backend", "text", "sleep mode needs no allocator of its own", "cumem"),
    noted("sleep_preserve_parameter_names", "texts", "at level 2 all weights are read again", []),
    noted("enable_cumem_allocator", "flag", "sleep mode needs no allocator of its own", False),
    noted("enable_nccl_comm_suspend", "flag", "there is no NCCL", False),
    to("model_impl", "text", values={"vllm": "quire"}),
    noted("override_attention_dtype", "text", "attention adds in float32"),
    to("logits_processors", "texts"),
    refused("logits_processor_pattern", "text", "no code of users runs in the engine"),
    refused("io_processor_plugin", "text", "no plugins are loaded"),
    noted("renderer_num_workers", "int", "chat templates run in two processes of their own", 1),
)

LOADING: tuple[VllmFlag, ...] = (
    to("load_format", "text", values=FORMAT_WORDS),
    to("download_dir", "text"),
    noted("safetensors_load_strategy", "text", MAPPED, "lazy"),
    noted("safetensors_prefetch_num_threads", "int", MAPPED),
    noted("safetensors_prefetch_block_size", "count", MAPPED),
    refused("model_loader_extra_config", "json", "the loaders that it configures are not there", {}),
    noted("ignore_patterns", "texts", "only the files that are read are fetched", ["original/**/*"]),
    noted("use_tqdm_on_load", "flag", "the start is reported as lines with seconds", True, False),
    noted("pt_load_map_location", "any", ".bin files are read to host memory", "cpu"),
)

ATTENTION: tuple[VllmFlag, ...] = (
    to(
        "attention_backend", "text", why="each device has its own", known=OUR_BACKENDS, values={"TRITON_ATTN": "triton"}
    ),
    noted("mamba_backend", "text", STATES),
    noted("mamba_ssu_algorithm", "text", STATES),
    refused("enable_mamba_cache_stochastic_rounding", "flag", STATES, False),
    noted("mamba_cache_philox_rounds", "int", STATES, 0),
)

CACHE: tuple[VllmFlag, ...] = (
    to("block_size", "int", why="a power of two"),
    to(
        "gpu_memory_utilization",
        "float",
        why="on a CPU the share of free memory for the KV cache",
        short=("--device-memory-utilization",),
    ),
    to("kv_cache_memory_bytes", "count", "kv_cache_memory"),
    to("kv_cache_dtype", "text", values={"float": "float32", "half": "float16"}),
    to("num_gpu_blocks_override", "int", "num_blocks_override"),
    to("enable_prefix_caching", "flag"),
    noted("prefix_caching_hash_algo", "text", "blocks are known by one 128-bit hash", "sha256"),
    noted("prefix_cache_retention_interval", "any", "cached blocks are kept until their memory is needed"),
    refused("kv_cache_dtype_skip_layers", "texts", "one kv_cache_dtype holds for all layers", []),
    noted("kv_sharing_fast_prefill", "flag", "prompts are computed in full", False),
    noted("mamba_cache_dtype", "text", STATES, "auto", "float32"),
    noted("mamba_ssm_cache_dtype", "text", STATES, "auto", "float32"),
    noted("mamba_block_size", "int", STATES),
    noted("prefix_match_unit", "any", "prefixes match by whole blocks"),
    noted("mamba_cache_mode", "text", STATES),
    noted("enable_mamba_shared_prefix_checkpoint", "flag", STATES, False),
    noted("swa_bounded_replay", "flag", "a window's blocks are cached as others are", True),
    noted("replayssm_buffer_len", "int", STATES),
    noted("use_replayssm", "flag", STATES, False),
    noted("kv_offloading_size", "float", OFFLOAD),
    noted("kv_offloading_backend", "text", OFFLOAD, "native"),
    noted("offload_backend", "text", WEIGHTS_STAY, "auto"),
    refused("cpu_offload_gb", "float", WEIGHTS_STAY, 0),
    noted("cpu_offload_params", "texts", WEIGHTS_STAY, []),
    refused("offload_group_size", "int", WEIGHTS_STAY, 0),
    noted("offload_num_in_group", "int", WEIGHTS_STAY, 1),
    noted("offload_prefetch_step", "int", WEIGHTS_STAY, 1),
    noted("offload_params", "texts", WEIGHTS_STAY, []),
)

MEDIA: tuple[VllmFlag, ...] = (
    to("language_model_only", "flag"),
    to("limit_mm_per_prompt", "json", why="numbers, or count, width, height and num_frames"),
    to("enable_mm_embeds", "flag", why="of images"),
    to("media_io_kwargs", "json", why="image.rgba_background_color, video.fps, video.num_frames"),
    to("mm_processor_kwargs", "json", why="min_pixels, max_pixels, and size with shortest_edge and longest_edge"),
    to("mm_processor_cache_gb", "float", why="1 where it is not given"),
    noted("mm_processor_cache_type", "text", "each front end keeps processed pictures of its own", "lru"),
    noted("mm_hasher_algorithm", "text", "pictures are known by SHA-256"),
    noted("mm_shm_cache_max_object_size_mb", "int", "no processed pictures are kept in shared memory"),
    refused("mm_encoder_only", "flag", "an engine has a language model", False),
    noted("mm_encoder_tp_mode", "text", "whole pictures are dealt to ranks", "data"),
    noted("mm_encoder_attn_backend", "text", "the tower computes as attention_backend says"),
    noted("mm_encoder_attn_dtype", "text", "attention_backend decides how the tower's attention rounds"),
    noted("mm_encoder_fp8_scale_path", "text", NO_TOWER_FP8),
    noted("mm_encoder_fp8_scale_save_path", "text", NO_TOWER_FP8),
    noted("mm_encoder_fp8_scale_save_margin", "float", NO_TOWER_FP8),
    noted("interleave_mm_strings", "flag", "pictures always stand where their parts stand", False, True),
    noted("skip_mm_profiling", "flag", "the tower's memory is computed from the model's files", False),
    noted("video_pruning_rate", "float", NO_PRUNING),
    noted("video_pruning_method", "text", NO_PRUNING),
    noted("mm_tensor_ipc", "text", "pixels reach the engine in its requests"),
    noted("mm_processor_device", "text", "pictures are processed by helper processes on CPUs", "auto", "cpu"),
    noted("mm_ipc_gpu_memory_gb", "float", "pixels reach the engine in its requests"),
    noted("mm_device_do_normalize", "flag", "pixels are normalised where the tower computes", False),
)

KEYWORDS: tuple[VllmFlag, ...] = (
    refused("model_weights", "text", "weights are read from where the model is", ""),
    noted("enable_mm_processor_stats", "flag", "/metrics counts hits of processed pictures", False),
    noted("mamba_config", "json", STATES, {}),
)
"""Keywords of vLLM's `LLM` that are not flags."""
