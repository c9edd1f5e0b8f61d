"""Which engine options a model that pools cannot have."""

from __future__ import annotations

from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.errors import ConfigError

CACHE_OPTIONS = ("kv_cache_memory", "num_blocks_override", "swap_space", "kv_offload_dir")


def check_pooling(options: EngineOptions, model: ModelConfig, *, is_accelerated: bool) -> None:
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
    if is_accelerated and (model.takes_whole_prompts or model.has_pooling_head):
        raise ConfigError(
            f"device='cuda' is not available for {model.architecture} here yet: use device='cpu'", param="device"
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
    if options.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size={options.tensor_parallel_size} is not available for {model.architecture} yet",
            param="tensor_parallel_size",
        )
