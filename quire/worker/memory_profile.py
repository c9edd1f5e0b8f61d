"""Memory available to an engine's pools, measured by dummy steps before the KV cache exists or estimated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from quire.config.model import ModelConfig
from quire.kv_cache.sizing import MemoryProfile
from quire.models.interface import CausalLM
from quire.worker.platform.interface import DraftModel, MemoryMeter, StepLimits


def measure_memory(model: CausalLM, config: ModelConfig, limits: StepLimits, meter: MemoryMeter) -> MemoryProfile:
    """Measure available memory and the largest step, or estimate the latter. Raises InsufficientMemoryError if the step
    does not fit."""
    available = meter.free()
    activations = estimate_activations(config, limits.max_num_tokens, limits.max_num_rows)
    measured = meter.step_bytes(model, limits, activations)
    if measured is not None:
        activations = measured
    device = meter.device_share(model, limits, available, activations)
    return MemoryProfile(available, activations, model.weight_bytes(), device)


def draft_memory(draft: DraftModel, limits: StepLimits) -> MemoryProfile:
    """Memory of a draft model, measured; a draft head's activations are estimated. Added to the main model's."""
    if draft.meter is None:
        activations = estimate_activations(draft.config, limits.max_num_tokens, limits.max_num_seqs)
        if draft.head is not None:  # what it reads, and a copy of it
            activations += 8 * limits.max_num_tokens * len(draft.head.taps) * draft.config.hidden_size
        return MemoryProfile(0, activations, draft.model.weight_bytes() if draft.is_apart else 0, None)
    return measure_memory(draft.model, draft.config, limits, draft.meter)


def estimate_activations(config: ModelConfig, num_tokens: int, num_rows: int) -> int:
    """Upper estimate of peak activations in bytes, in float32."""
    named = (config.hf.get(name) for name in ("intermediate_size", "ffn_dim", "n_inner"))
    intermediate = next((int(size) for size in named if size), 4 * config.hidden_size)
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    per_token = 6 * config.hidden_size + 3 * intermediate + 3 * heads
    return 4 * (num_tokens * per_token + 5 * num_rows * config.vocab_size)


def dummy_columns(names: Sequence[str], token_ids: torch.Tensor) -> Mapping[str, torch.Tensor]:
    return {name: torch.zeros_like(token_ids) for name in names}
