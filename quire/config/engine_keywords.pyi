from __future__ import annotations

from typing import Any, TypedDict

class EngineKeywords(TypedDict, total=False):
    """Keyword arguments of `LLM` and `AsyncLLM`: fields of `EngineOptions` but the model."""

    runner: str
    """generate, pooling (vectors of texts), or auto: as the model is made"""
    tokenizer: str | None
    """directory, GGUF file or hub id of the tokenizer (default: the model's)"""
    tokenizer_revision: str | None
    """branch, tag or commit of the tokenizer's hub id (default: revision, for the model's own)"""
    chat_template: str | None
    """file of a chat template, or the template itself, in place of the model's"""
    skip_tokenizer_init: bool
    """run without a tokenizer: prompts are token ids, outputs have no text"""
    dtype: str
    """of the weights: auto (as stored), float32, bfloat16 or float16"""
    device: str
    """auto (cuda where torch and the driver have it), cpu or cuda"""
    seed: int
    """seed of the engine: draws the seeds of requests that bring none"""
    load_format: str
    """auto, safetensors, pt, gguf, or dummy (random weights)"""
    model_impl: str
    """auto, quire (its own model code), or transformers (the library's code with Quire's kernels; slower)"""
    load_draft_head: bool
    """load the head for drafts of a checkpoint that has one, also where it makes none"""
    language_model_only: bool
    """take text alone: of a model that takes images no vision tower is loaded"""
    limit_mm_per_prompt: dict[str, Any] | None
    """JSON object of most inputs of a prompt: {'image': 4}, or count, width, height (0: text alone)"""
    mm_processor_kwargs: dict[str, Any] | None
    """JSON object: min_pixels and max_pixels of a picture after it is resized"""
    media_io_kwargs: dict[str, Any] | None
    """JSON object: image.rgba_background_color, which transparent pictures are laid over"""
    mm_processor_cache_gb: float
    """GiB of processed pictures that a front end keeps (1)"""
    allowed_media_domains: list[str] | None
    """hosts that URLs of pictures may name (default: none); addresses if they are not public"""
    allowed_local_media_path: str
    """directory of pictures that file URLs may name (default: none)"""
    enable_mm_embeds: bool
    """take features that clients computed of images (image_embeds): of trusted clients alone"""
    mmproj: str | None
    """GGUF file of a GGUF model's vision tower (default: *mmproj*.gguf beside the model)"""
    revision: str | None
    """branch, tag or commit of a hub id"""
    download_dir: str | None
    """directory that hub ids are fetched into (default: the hub library's cache)"""
    hf_overrides: dict[str, Any] | None
    """JSON object whose keys replace those of config.json before it is read"""
    generation_config: str
    """defaults of sampling: auto (the model's generation_config.json), vllm (none), or a directory"""
    override_generation_config: dict[str, Any] | None
    """JSON object whose keys replace those of generation_config.json"""
    max_logprobs: int
    """most alternatives of a token that a request may ask for (-1: the vocabulary)"""
    logprobs_mode: str
    """raw_logprobs (the model's), processed_logprobs (as drawn from), raw_logits or processed_logits"""
    structured_outputs_config: dict[str, Any] | None
    """JSON object of settings for every constraint, such as disable_any_whitespace"""
    speculative_config: dict[str, Any] | None
    """JSON object of drafts: method or model, num_speculative_tokens, more (docs/speculation.md)"""
    enable_lora: bool
    """let requests have adapters of low rank (docs/adapters.md)"""
    max_loras: int
    """adapters whose requests run at a time"""
    max_lora_rank: int
    """largest rank of an adapter: 1, 8, 16, 32, 64, 128, 256, 320 or 512"""
    max_cpu_loras: int | None
    """adapters that stay loaded (default: max_loras)"""
    lora_dtype: str
    """of the adapters' matrices: auto (the model's), float32, bfloat16 or float16"""
    lora_target_modules: list[str] | None
    """names of the modules that adapters may change (default: any)"""
    logits_processors: list[str] | None
    """classes that change logits, module:Class each (docs/logits-processors.md)"""
    quantization: str | None
    """int8, int4, w8a8, w4a8, fp8, mxfp4: quantise while loading (default: what the checkpoint brings)"""
    max_model_len: int | None
    """most tokens of one sequence, such as 4096, 4k or auto (default: the model's limit)"""
    block_size: int
    """tokens per KV block"""
    max_num_seqs: int | None
    """most sequences that run at once (default: 128; 256 on cuda; at most max_num_batched_tokens)"""
    max_num_batched_tokens: int | None
    """most tokens computed in one step (default: 2048; 8192 on cuda; at least max_num_seqs)"""
    max_prefill_chunk: int | None
    """most tokens of one sequence in one step"""
    queue_depth: int | None
    """steps in flight: 1 synchronous, 2 plans the next while one runs (default: 1; 2 on cuda)"""
    scheduling_policy: str
    """fcfs (first come, first served) or priority (order by the requests' priority and age)"""
    priority_seconds: float
    """seconds of waiting that one level of a request's priority is worth"""
    kv_cache_memory: int | str | None
    """memory of the KV cache (of all replicas), such as 4GiB (default: from what is free)"""
    gpu_memory_utilization: float | None
    """cuda: share of its memory for everything (0.9); CPU: share of free memory for KV (0.5)"""
    num_blocks_override: int | None
    """exactly this many KV blocks (of each replica)"""
    prefault_kv_cache: bool
    """write to all KV memory at the start: no prompt waits for it (CPU; cuda always has it)"""
    enable_prefix_caching: bool
    """reuse the KV blocks of equal prefixes"""
    state_snapshot_interval: int
    """tokens between cached states of recurrent layers, rounded up to whole blocks"""
    preemption_mode: str
    """what happens to a preempted request: recompute, swap (to host memory), or auto (the cheaper)"""
    swap_space: int | float | str | None
    """host memory for swapped requests and offloaded blocks (default where it is used: 4GiB, if free)"""
    kv_offload_dir: str | None
    """directory that keeps cached KV blocks for this and later engines (default: none)"""
    kv_offload_size: int | str | None
    """what that directory may hold, such as 50GiB (default with kv_offload_dir: 16GiB)"""
    tensor_parallel_size: int
    """processes that share each layer (more than 1: on a CPU)"""
    pipeline_parallel_size: int
    """stages of processes that share out the layers (more than 1: on a CPU)"""
    data_parallel_size: int
    """engines of a server or AsyncLLM that share out requests, cores and memory (CPU)"""
    decode_context_parallel_size: int
    """ranks of tensor_parallel_size with the same keys that share a context's tokens (1)"""
    prefill_context_parallel_size: int
    """groups of those ranks that share the tokens of prompts (more than 1: on a CPU)"""
    cp_kv_cache_interleave_size: int
    """tokens in a row that one of those ranks keeps (1)"""
    enable_expert_parallel: bool
    """deal whole experts to all ranks of all replicas (default: a slice of each)"""
    expert_placement_strategy: str
    """linear (neighbouring experts on one rank) or round_robin (they take turns)"""
    enable_eplb: bool
    """move and copy experts between ranks of enable_expert_parallel, by the rows that they compute"""
    eplb_config: dict[str, Any] | None
    """JSON object: num_redundant_experts (0), window_size (1000) and step_interval (3000) of enable_eplb"""
    distributed_executor_backend: str
    """where ranks run: auto, uni (engine), mp (processes), ray or external_launcher"""
    ray_placement: str
    """pack (ranks on few of Ray's nodes) or strict_spread (each on a node of its own)"""
    attention_backend: str
    """auto, native (CPU kernels for the whole model), torch (plain operators) or triton (cuda)"""
    kv_cache_dtype: str
    """auto (dtype; on a CPU GGUF: bfloat16, float16: float32), float32, bfloat16, float16, int8, fp8"""
    mla_prompt: str
    """latent attention of prompts: absorbed, expanded (the batch may change bits), auto (cuda: expanded)"""
    matmul_precision: str
    """auto, float32, bfloat16 (AVX512-BF16, AMX), fp8 (a GPU: activations rounded like FP8 weights)"""
    activation_bits: str
    """auto, 8, 16 or 32: what activations keep as they meet integers and 4-bit floats on a CPU"""
    num_threads: int | None
    """compute threads of a process (default: cores, or the CPU quota, shared by all ranks and replicas)"""
    enforce_eager: bool
    """no CUDA graphs: the same as cuda_graphs none"""
    cuda_graphs: str
    """auto (on cuda: full_and_piecewise), none, full, piecewise or full_and_piecewise"""
    cuda_graph_sizes: list[int] | None
    """numbers of tokens that CUDA graphs are captured for (default: a ladder up to 1024)"""
    batch_invariant: bool
    """cuda: a request's bits depend on its own tokens alone (slower; CPUs do it always)"""
    expert_counts: bool
    """count how many tokens each expert computes, for LLM.stats()"""
    output_window: float
    """most seconds that tokens of short steps wait to be sent together (below 8 sequences a quarter)"""
    step_log: str | None
    """file for one JSON line a step: what it computed and how long it took (default: none)"""
