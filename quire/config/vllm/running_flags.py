"""vLLM's engine flags of ranks, adapters, scheduling, observation and kernels, in vLLM's order: one line each."""

from __future__ import annotations

from quire.config.vllm.record import VllmFlag, noted, refused, so, to

ONE_MACHINE = "all ranks run on this machine"
NO_REPLICAS = "one engine serves: start one server a replica, behind a load balancer"
NO_CONTEXT_RANKS = "one rank holds the whole context of a sequence"
NO_EXPERT_RANKS = "each rank has its share of every expert: the answers are the same"
ALL_RANKS_ALIKE = "the ranks pass messages over gloo"
NO_ADAPTERS = "adapters are not supported yet"
KERNELS_CHOSEN = "kernels are chosen by the device and the shape"
NO_SPECULATION = "no tokens are guessed ahead yet: the answers are the same without it"
MEASURED = "/metrics always has what is measured"
ONE_PLACE = "the KV cache serves one engine"
LOGGED = "QUIRE_LOG_LEVEL sets what the log has, QUIRE_LOG_FORMAT its form"

PARALLEL: tuple[VllmFlag, ...] = (
    noted("distributed_executor_backend", "text", "one process a rank on this machine", "mp", "uni"),
    to("pipeline_parallel_size", "int", short=("-pp",), why="1 only, so far"),
    noted("master_addr", "text", ONE_MACHINE, "127.0.0.1"),
    noted("master_port", "int", ONE_MACHINE),
    refused("nnodes", "int", ONE_MACHINE, 1, short=("-n",)),
    refused("node_rank", "int", ONE_MACHINE, 0, short=("-r",)),
    noted("distributed_timeout_seconds", "int", "a rank that is silent ends the engine"),
    noted("cpu_distributed_timeout_seconds", "int", "a rank that is silent ends the engine"),
    noted("numa_bind", "flag", "start with numactl instead", False),
    noted("numa_bind_nodes", "ints", "start with numactl instead"),
    noted("numa_bind_cpus", "texts", "start with numactl or taskset instead"),
    refused("device_ids", "text", "set CUDA_VISIBLE_DEVICES instead"),
    to("tensor_parallel_size", "int", short=("-tp",), why="on a CPU so far"),
    refused("decode_context_parallel_size", "int", NO_CONTEXT_RANKS, 1, short=("-dcp",)),
    noted("dcp_comm_backend", "text", NO_CONTEXT_RANKS),
    noted("dcp_q_replicate", "flag", NO_CONTEXT_RANKS, False),
    noted("dcp_kv_cache_interleave_size", "int", NO_CONTEXT_RANKS, 1),
    noted("cp_kv_cache_interleave_size", "int", NO_CONTEXT_RANKS, 1),
    refused("prefill_context_parallel_size", "int", NO_CONTEXT_RANKS, 1, short=("-pcp",)),
    refused("data_parallel_size", "int", NO_REPLICAS, 1, short=("-dp",)),
    refused("data_parallel_rank", "int", NO_REPLICAS, short=("-dpn",)),
    refused("data_parallel_start_rank", "int", NO_REPLICAS, 0, short=("-dpr",)),
    refused("data_parallel_size_local", "int", NO_REPLICAS, 1, short=("-dpl",)),
    noted("data_parallel_address", "text", NO_REPLICAS, short=("-dpa",)),
    noted("data_parallel_rpc_port", "int", NO_REPLICAS, short=("-dpp",)),
    noted("data_parallel_backend", "text", NO_REPLICAS, "mp", short=("-dpb",)),
    refused("data_parallel_hybrid_lb", "flag", NO_REPLICAS, False, short=("-dph",)),
    refused("data_parallel_external_lb", "flag", NO_REPLICAS, False, short=("-dpe",)),
    refused("data_parallel_multi_port_external_lb", "flag", NO_REPLICAS, False, short=("-dpm",)),
    noted("enable_hc_sp", "flag", ALL_RANKS_ALIKE, False),
    noted("enable_expert_parallel", "flag", NO_EXPERT_RANKS, False, short=("-ep",)),
    noted("enable_batch_sharded_sampling", "flag", "every rank has all logits", False),
    noted("enable_ep_weight_filter", "flag", NO_EXPERT_RANKS, False),
    noted("all2all_backend", "text", NO_EXPERT_RANKS),
    noted("enable_dbo", "flag", NO_EXPERT_RANKS, False),
    noted("ubatch_size", "int", NO_EXPERT_RANKS, 0),
    noted("enable_shm_tensor_arena", "flag", ALL_RANKS_ALIKE, False),
    refused("enable_elastic_ep", "flag", NO_EXPERT_RANKS, False),
    noted("elastic_ep_max_dp_size", "int", NO_EXPERT_RANKS),
    noted("dbo_decode_token_threshold", "int", NO_EXPERT_RANKS),
    noted("dp_sync_interval", "int", NO_REPLICAS),
    noted("dbo_prefill_token_threshold", "int", NO_EXPERT_RANKS),
    noted("disable_nccl_for_dp_synchronization", "flag", NO_REPLICAS, True, False),
    noted("enable_eplb", "flag", NO_EXPERT_RANKS, False),
    noted("eplb_config", "json", NO_EXPERT_RANKS, {}),
    noted("expert_placement_strategy", "text", NO_EXPERT_RANKS, "linear"),
    noted("max_parallel_loading_workers", "int", "each rank reads its own part of the weights"),
    noted("ray_workers_use_nsight", "flag", "there is no Ray", False),
    noted("disable_custom_all_reduce", "flag", ALL_RANKS_ALIKE, True, False),
    refused("worker_cls", "text", "no code of users runs in the engine", "auto"),
    refused("worker_extension_cls", "text", "no code of users runs in the engine", ""),
    noted("enable_fault_tolerance", "flag", "it is for replicas of one model", False),
    noted("fault_tolerance_config", "json", "it is for replicas of one model", {}),
)

ADAPTERS: tuple[VllmFlag, ...] = (
    refused("enable_lora", "flag", NO_ADAPTERS, False),
    noted("max_loras", "int", NO_ADAPTERS, 1),
    noted("max_lora_rank", "int", NO_ADAPTERS, 16),
    noted("lora_dtype", "text", NO_ADAPTERS, "auto"),
    noted("enable_tower_connector_lora", "flag", NO_ADAPTERS, False),
    noted("max_cpu_loras", "int", NO_ADAPTERS),
    noted("max_lora_cls_labels", "int", NO_ADAPTERS),
    noted("fully_sharded_loras", "flag", NO_ADAPTERS, False),
    noted("lora_target_modules", "texts", NO_ADAPTERS, []),
    refused("default_mm_loras", "json", NO_ADAPTERS, {}),
    noted("specialize_active_lora", "flag", NO_ADAPTERS, False),
    noted("enable_mixed_moe_lora_format", "flag", NO_ADAPTERS, False),
    noted("enable_moe_shared_loras", "flag", NO_ADAPTERS, False),
)

OBSERVABILITY: tuple[VllmFlag, ...] = (
    noted("show_hidden_metrics_for_version", "text", MEASURED),
    to("otlp_traces_endpoint", "text", why="by OTLP over HTTP (port 4318), where vLLM's default is gRPC"),
    to("collect_detailed_traces", "texts", why="any of the values gives each phase of a request a span of its own"),
    noted("per_request_spec_decode_metrics", "text", NO_SPECULATION),
    refused("custom_histogram_buckets", "json", "the buckets are vLLM's by default", {}),
    noted("logging_config", "json", LOGGED, {}),
    noted("log_level", "text", LOGGED),
    noted("kv_cache_metrics", "flag", MEASURED, False),
    noted("kv_cache_metrics_sample", "float", MEASURED),
    noted("cudagraph_metrics", "flag", MEASURED, False),
    noted("enable_layerwise_nvtx_tracing", "flag", "steps are logged with --step-log", False),
    noted("enable_mfu_metrics", "flag", "steps are logged with --step-log", False),
    noted("enable_logging_iteration_details", "flag", "steps are logged with --step-log", False),
    noted("jit_monitor_mode", "text", "kernels are compiled before the server is ready"),
    noted("jit_monitor_verbose", "flag", "kernels are compiled before the server is ready", False),
)

SCHEDULER: tuple[VllmFlag, ...] = (
    to("max_num_batched_tokens", "count"),
    noted("max_num_scheduled_tokens", "count", "--max-num-batched-tokens says what a step may compute"),
    to("max_num_seqs", "count"),
    refused("max_num_active_seqs", "int", "give --max-num-seqs that number: it costs no memory of its own"),
    to("max_num_queued_reqs", "count", "max_num_queued", is_keyword=False),
    to("max_num_queued_tokens", "count", "max_num_queued_tokens", is_keyword=False),
    to("long_prefill_token_threshold", "int", "max_prefill_chunk", values={0: None}),
    noted("long_prefill_token_threshold_adaptive", "flag", "the threshold holds whatever waits", False),
    to("scheduling_policy", "text"),
    so("enable_chunked_prefill", "flag", "prompts are always cut to the step's budget", True),
    noted("disable_chunked_mm_input", "flag", "only text is taken", False),
    refused("scheduler_cls", "text", "no code of users runs in the engine"),
    noted("scheduler_reserve_full_isl", "flag", "a request starts when its first chunk has blocks", True, False),
    noted("watermark", "float", "a block is taken as soon as one is free", 0),
    noted("prefill_schedule_interval", "int", "each step takes prompts and decodes together", 1),
    noted("disable_hybrid_kv_cache_manager", "flag", "each kind of layer keeps only what it reads", True, False),
    to("async_scheduling", "flag", "queue_depth", values={True: 2, False: 1}),
    to("stream_interval", "int", why="a request's own stream_interval counts more"),
)

KERNELS: tuple[VllmFlag, ...] = (
    noted("cudagraph_capture_sizes", "ints", "on cuda: --cuda-graph-sizes, a ladder up to 1024 by default"),
    noted("max_cudagraph_capture_size", "int", "on cuda: --cuda-graph-sizes, a ladder up to 1024 by default"),
    noted("ir_op_priority", "json", KERNELS_CHOSEN, {}),
    noted("enable_flashinfer_autotune", "flag", KERNELS_CHOSEN, True, False),
    noted("enable_bf16x3_router_gemm", "flag", KERNELS_CHOSEN, True, False),
    noted("moe_backend", "text", KERNELS_CHOSEN, "auto"),
    noted("linear_backend", "text", KERNELS_CHOSEN, "auto"),
    noted("sparse_indexer_topk_backend", "text", KERNELS_CHOSEN, "auto"),
    noted("gdn_prefill_backend", "text", KERNELS_CHOSEN),
    noted("kda_prefill_backend", "text", KERNELS_CHOSEN),
    noted("kda_decode_backend", "text", KERNELS_CHOSEN),
    noted("kernel_config", "json", KERNELS_CHOSEN, {}),
    noted("attention_config", "json", KERNELS_CHOSEN, {}, short=("-ac",)),
    noted("compilation_config", "json", "nothing is compiled; on cuda, --cuda-graphs chooses", {}, short=("-cc",)),
    noted("optimization_level", "int", "nothing is compiled; on cuda, --cuda-graphs chooses", 2),
    noted("performance_mode", "text", KERNELS_CHOSEN, "balanced"),
)

FEATURES: tuple[VllmFlag, ...] = (
    noted("speculative_config", "json", NO_SPECULATION, short=("-sc",)),
    noted("spec_method", "text", NO_SPECULATION),
    noted("spec_model", "text", NO_SPECULATION),
    noted("spec_tokens", "int", NO_SPECULATION),
    refused("diffusion_config", "json", "models generate from left to right", short=("-dc",)),
    refused("kv_transfer_config", "json", ONE_PLACE),
    refused("kv_events_config", "json", ONE_PLACE),
    refused("ec_transfer_config", "json", ONE_PLACE),
    refused("ec_manager_config", "json", ONE_PLACE),
    refused("additional_config", "json", "no plugins are loaded", {}),
    refused("watermark_config", "json", "texts get no watermark"),
    refused("engram_config", "json", "no model with Engram tables is there"),
    refused("aux_output_config", "json", "answers do not tell which experts were used", {}),
    to("structured_outputs_config", "json", why="llguidance compiles every grammar, whatever `backend` says"),
    refused("profiler_config", "json", "steps are logged with --step-log", {}),
    refused("weight_transfer_config", "json", "weights come from files", {}),
    to("reasoning_parser", "text"),
    refused("reasoning_parser_plugin", "text", "no plugins are loaded", ""),
    noted("reasoning_config", "json", "the reasoning parser knows the marks of thoughts", {}),
    noted("disable_log_stats", "flag", "the log has no statistics; /metrics always has them", True, False),
    noted("aggregate_engine_logging", "flag", "the log has no statistics", True, False),
    noted("fail_on_environ_validation", "flag", "variables of vLLM are not read", False),
)

OLDER: tuple[VllmFlag, ...] = (
    to(
        "swap_space",
        "float",
        why="GiB, a bare number; preempted requests then swap where that is cheaper",
        values={0: None},
    ),
    to("preemption_mode", "text"),
    to("device", "text"),
    refused("rope_scaling", "json", "write --hf-overrides '{\"rope_scaling\": ...}'", {}),
    refused("rope_theta", "float", "write --hf-overrides '{\"rope_theta\": ...}'"),
    noted("max_num_partial_prefills", "int", "--max-prefill-chunk bounds what one prompt gets", 1),
    noted("max_long_partial_prefills", "int", "--max-prefill-chunk bounds what one prompt gets", 1),
    noted("calculate_kv_scales", "flag", "scales are found for each token, or are 1", False),
    noted("max_seq_len_to_capture", "int", "on cuda: --cuda-graph-sizes"),
    noted("guided_decoding_backend", "text", "llguidance compiles every grammar", "auto", "guidance"),
    noted("num_lookahead_slots", "int", NO_SPECULATION, 0),
    noted("num_scheduler_steps", "int", "--queue-depth plans ahead", 1),
    noted("scheduler_delay_factor", "float", "prompts do not wait for more of them", 0),
    noted("use_v2_block_manager", "flag", "there is one block manager", True, False),
    noted("disable_async_output_proc", "flag", "--queue-depth plans ahead", False),
    noted("worker_use_ray", "flag", "there is no Ray", False),
    noted("disable_mm_preprocessor_cache", "flag", "only text is taken", True, False),
    refused("enable_prompt_adapter", "flag", NO_ADAPTERS, False),
)
