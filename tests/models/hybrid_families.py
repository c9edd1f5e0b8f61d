"""Tiny random models of families with layers that keep a state, as Transformers builds them."""

from __future__ import annotations

from collections.abc import Callable

from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

SMALL_STATES = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
"""A page of a state is no larger than one of attention: snapshots may lie as close as borders."""
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 40,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}


def qwen3_next(**options: object) -> PreTrainedModel:
    return Qwen3NextForCausalLM(Qwen3NextConfig(**{**SIZES, **EXPERTS, **options}))


def qwen3_5_moe(**options: object) -> PreTrainedModel:
    sizes = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**{**sizes, **EXPERTS, **options}))


def qwen3_5(**options: object) -> PreTrainedModel:
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**SIZES, **options}))


def qwen3_5_vision(**options: object) -> PreTrainedModel:
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 48}
    config = Qwen3_5Config(text_config={**SIZES, **options}, vision_config=vision)
    return Qwen3_5ForConditionalGeneration(config)


HYBRID_FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3-next": qwen3_next,
    "qwen3-next-few-experts": lambda: qwen3_next(
        **{**SMALL_STATES, "linear_num_value_heads": 3}, mlp_only_layers=[1, 3], norm_topk_prob=False
    ),
    "qwen3.5-moe": lambda: qwen3_5_moe(num_hidden_layers=2, full_attention_interval=2),
    "qwen3.5": qwen3_5,
    "qwen3.5-small-states": lambda: qwen3_5(
        **SMALL_STATES,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "qwen3.5-two-of-two": lambda: qwen3_5(
        full_attention_interval=2, num_hidden_layers=2, attention_bias=True, linear_conv_kernel_dim=3, head_dim=24
    ),
    "qwen3.5-state-last": lambda: qwen3_5(
        layer_types=["full_attention", "linear_attention"], num_hidden_layers=2, tie_word_embeddings=True
    ),
    "qwen3.5-attention-alone": lambda: qwen3_5(full_attention_interval=1, num_hidden_layers=1),
    "qwen3.5-vision": qwen3_5_vision,
}
