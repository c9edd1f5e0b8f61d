"""The memory that one engine can have for its pools: measured by dummy steps before the KV cache exists, or
estimated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from quire.config.model import ModelConfig
from quire.kv_cache.sizing import MemoryProfile
from quire.models.interface import CausalLM
from quire.worker.platform.interface import DraftModel, MemoryMeter, StepLimits


def measure_memory(model: CausalLM, config: ModelConfig, limits: StepLimits, meter: MemoryMeter) -> MemoryProfile:
    """Measure what is available, then what the largest step takes; estimate where that cannot be measured. Raises
    InsufficientMemoryError when the step itself does not fit."""
    available = meter.free()
    activations = estimate_activations(config, limits.max_num_tokens, limits.max_num_rows)
    measured = meter.step_bytes(model, limits, activations)
    if measured is not None:
        activations = measured
    device = meter.device_share(model, limits, available, activations)
    return MemoryProfile(available, activations, model.weight_bytes(), device)


def draft_memory(draft: DraftModel, limits: StepLimits) -> MemoryProfile:
    """What a model that makes drafts takes; of a head the activations are estimated."""
    if draft.meter is None:
        activations = estimate_activations(draft.config, limits.max_num_tokens, limits.max_num_seqs)
        if draft.head is not None:  # what it reads, and a copy of it
            activations += 8 * limits.max_num_tokens * len(draft.head.taps) * draft.config.hidden_size
        return MemoryProfile(0, activations, draft.model.weight_bytes() if draft.is_apart else 0, None)
    return measure_memory(draft.model, draft.config, limits, draft.meter)


def estimate_activations(config: ModelConfig, num_tokens: int, num_rows: int) -> int:
    """A generous estimate of the peak in bytes, everything in float32: per token three copies of the widest
    intermediate, six of the hidden state and three of query, key and value; per sampled row five of the logits."""
    named = (config.hf.get(name) for name in ("intermediate_size", "ffn_dim", "n_inner"))
    intermediate = next((int(size) for size in named if size), 4 * config.hidden_size)
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    per_token = 6 * config.hidden_size + 3 * intermediate + 3 * heads
    return 4 * (num_tokens * per_token + 5 * num_rows * config.vocab_size)


def dummy_columns(names: Sequence[str], token_ids: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Columns of a dummy pass over `token_ids`, [T]: zeros."""
    return {name: torch.zeros_like(token_ids) for name in names}
