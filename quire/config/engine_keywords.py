from __future__ import annotations

from typing import Any, TypedDict


class EngineKeywords(TypedDict, total=False):
    """Keyword arguments of `LLM` and `AsyncLLM`: fields of `EngineOptions` but the model."""

    runner: str
    tokenizer: str | None
    tokenizer_revision: str | None
    chat_template: str | None
    skip_tokenizer_init: bool
    dtype: str
    device: str
    seed: int
    load_format: str
    model_impl: str
    load_draft_head: bool
    language_model_only: bool
    limit_mm_per_prompt: dict[str, Any] | None
    mm_processor_kwargs: dict[str, Any] | None
    media_io_kwargs: dict[str, Any] | None
    mm_processor_cache_gb: float
    allowed_media_domains: list[str] | None
    allowed_local_media_path: str
    enable_mm_embeds: bool
    mmproj: str | None
    revision: str | None
    download_dir: str | None
    hf_overrides: dict[str, Any] | None
    generation_config: str
    override_generation_config: dict[str, Any] | None
    max_logprobs: int
    logprobs_mode: str
    structured_outputs_config: dict[str, Any] | None
    speculative_config: dict[str, Any] | None
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int | None
    lora_dtype: str
    lora_target_modules: list[str] | None
    logits_processors: list[str] | None
    quantization: str | None
    max_model_len: int | None
    block_size: int
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_prefill_chunk: int | None
    queue_depth: int | None
    scheduling_policy: str
    priority_seconds: float
    kv_cache_memory: int | str | None
    gpu_memory_utilization: float | None
    num_blocks_override: int | None
    prefault_kv_cache: bool
    enable_prefix_caching: bool
    state_snapshot_interval: int
    preemption_mode: str
    swap_space: int | float | str | None
    kv_offload_dir: str | None
    kv_offload_size: int | str | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    decode_context_parallel_size: int
    prefill_context_parallel_size: int
    cp_kv_cache_interleave_size: int
    enable_expert_parallel: bool
    expert_placement_strategy: str
    enable_eplb: bool
    eplb_config: dict[str, Any] | None
    distributed_executor_backend: str
    ray_placement: str
    attention_backend: str
    kv_cache_dtype: str
    mla_prompt: str
    matmul_precision: str
    activation_bits: str
    num_threads: int | None
    enforce_eager: bool
    cuda_graphs: str
    cuda_graph_sizes: list[int] | None
    batch_invariant: bool
    expert_counts: bool
    output_window: float
    step_log: str | None
