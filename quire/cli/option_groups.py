"""Groups of the options of `quire serve`, as its help shows them."""

from __future__ import annotations

from collections.abc import Mapping

GROUPS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "first": (
        "what most servers set",
        ("host", "port", "model", "served_model_name", "api_key", "max_model_len", "max_num_seqs", "kv_cache_memory",
         "gpu_memory_utilization"),
    ),
    "model": (
        "the model and its files",
        ("runner", "tokenizer", "tokenizer_revision", "chat_template", "skip_tokenizer_init", "dtype", "quantization",
         "load_format", "model_impl", "load_draft_head", "revision", "download_dir", "hf_overrides",
         "generation_config", "override_generation_config"),
    ),
    "images": (
        "images",
        ("language_model_only", "limit_mm_per_prompt", "mm_processor_kwargs", "media_io_kwargs",
         "mm_processor_cache_gb",
         "allowed_media_domains", "allowed_local_media_path", "trust_request_mm_kwargs"),
    ),
    "kv": (
        "the KV cache",
        ("block_size", "num_blocks_override", "kv_cache_dtype", "prefault_kv_cache", "enable_prefix_caching",
         "preload_prefix", "state_snapshot_interval", "preemption_mode", "swap_space", "kv_offload_dir",
         "kv_offload_size"),
    ),
    "scheduling": (
        "steps and waiting requests",
        ("max_num_batched_tokens", "max_prefill_chunk", "queue_depth", "scheduling_policy", "priority_seconds",
         "priority_range", "max_num_queued", "max_num_queued_tokens", "output_window", "stream_interval",
         "speculative_config"),
    ),
    "adapters": (
        "adapters of low rank",
        ("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype", "lora_target_modules",
         "lora_modules", "lora_dir"),
    ),
    "device": (
        "what computes",
        ("device", "num_threads", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
         "decode_context_parallel_size", "cp_kv_cache_interleave_size", "enable_expert_parallel",
         "expert_placement_strategy", "distributed_executor_backend", "ray_placement", "attention_backend",
         "mla_prompt", "matmul_precision", "activation_bits", "enforce_eager", "cuda_graphs",
         "cuda_graph_sizes", "batch_invariant"),
    ),
    "answers": (
        "requests and answers",
        ("seed", "max_logprobs", "logprobs_mode", "logits_processors", "structured_outputs_config", "response_role",
         "dialect", "api", "strict_fields", "default_chat_template_kwargs", "chat_template_content_format",
         "enable_auto_tool_choice", "tool_call_parser", "reasoning_parser", "exclude_tools_when_tool_choice_none",
         "enable_force_include_usage", "return_tokens_as_token_ids", "enable_request_id_headers",
         "max_stored_responses", "response_store_size"),
    ),
    "access": (
        "who may do what",
        ("api_key_file", "admin_api_key", "enable_admin_routes", "enable_sleep_mode", "enable_tokenizer_info_endpoint",
         "protect_metrics", "trust_request_chat_template", "cors_allowed_origins", "allowed_hosts", "ssl_keyfile",
         "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"),
    ),
    "http": (
        "connections and processes",
        ("uds", "root_path", "api_server_count", "restart_engine", "hung_engine_timeout", "shutdown_timeout",
         "keep_alive_timeout", "header_timeout", "body_timeout", "write_timeout", "max_connections", "max_body_size",
         "max_total_body_size", "max_head_size", "max_num_headers", "disable_fastapi_docs"),
    ),
    "observe": (
        "logs, metrics and traces",
        ("log_format", "enable_log_requests", "max_log_len", "access_log", "disable_log_stats", "step_log",
         "expert_counts", "enable_per_request_metrics", "per_request_spec_decode_metrics", "metrics_names",
         "otlp_traces_endpoint", "collect_detailed_traces"),
    ),
}  # fmt: skip
"""Name of a group, for `--help=NAME` -> its title and the fields of EngineOptions and ServerSettings in it."""
