"""Tiny random models of the dense families whose layers compute more than LLaMA's, in odd shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

FULL, SLIDING = "full_attention", "sliding_attention"
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
LONG = {name: [1.0, 1.1, 1.3, 1.7, 2.5, 4.0] for name in ("short_factor", "long_factor")}
"""The same for any length: Transformers changes from one to the other as a sequence grows."""


def _local_and_global(**full: object) -> dict[str, Any]:
    return {
        FULL: {"rope_type": "default", "rope_theta": 900.0, **full},
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
    }


def gemma(**options: object) -> PreTrainedModel:
    return GemmaForCausalLM(GemmaConfig(**{**SIZES, "head_dim": 24, **options}))


def gemma2(**options: object) -> PreTrainedModel:
    sizes = {"head_dim": 40, "query_pre_attn_scalar": 30, "sliding_window": 6, "_attn_implementation": "eager"}
    caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0}
    return Gemma2ForCausalLM(Gemma2Config(**{**SIZES, **sizes, **caps, **options}))


def gemma3(**options: object) -> PreTrainedModel:
    sizes = {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 20, "num_hidden_layers": 4}
    sizes |= {"sliding_window_pattern": 3}
    ropes = {"rope_parameters": _local_and_global(rope_type="linear", factor=4.0)}
    return Gemma3ForCausalLM(Gemma3TextConfig(**{**SIZES, **sizes, **ropes, **options}))


def phi3(**options: object) -> PreTrainedModel:
    return Phi3ForCausalLM(Phi3Config(**{**SIZES, "hidden_size": 96, "sliding_window": 40, **options}))


def olmo2(**options: object) -> PreTrainedModel:
    return Olmo2ForCausalLM(Olmo2Config(**{**SIZES, "hidden_size": 96, **options}))


def olmo3(**options: object) -> PreTrainedModel:
    sizes = {"sliding_window": 20, "num_hidden_layers": 5, "hidden_size": 96}
    ropes = {"rope_parameters": _local_and_global(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)}
    return Olmo3ForCausalLM(Olmo3Config(**{**SIZES, **sizes, **ropes, **options}))


def glm(**options: object) -> PreTrainedModel:
    return GlmForCausalLM(GlmConfig(**{**SIZES, "head_dim": 24, **options}))


def glm4(**options: object) -> PreTrainedModel:
    return Glm4ForCausalLM(Glm4Config(**{**SIZES, "head_dim": 40, "attention_bias": False, **options}))


def smollm3(**options: object) -> PreTrainedModel:
    return SmolLM3ForCausalLM(SmolLM3Config(**{**SIZES, "hidden_size": 96, "num_hidden_layers": 5, **options}))


def granite(**options: object) -> PreTrainedModel:
    factors = {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.2}
    return GraniteForCausalLM(
        GraniteConfig(**{**SIZES, **factors, "hidden_size": 64, "logits_scaling": 0.7, **options})
    )


DENSE_FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma2-three-layers": lambda: gemma2(
        head_dim=192,
        query_pre_attn_scalar=192,
        num_key_value_heads=1,
        num_hidden_layers=3,
        layer_types=[FULL, SLIDING, FULL],
        attn_logit_softcapping=None,
        tie_word_embeddings=False,
    ),
    "gemma3": gemma3,
    "gemma3-all-sliding": lambda: gemma3(
        head_dim=96, num_key_value_heads=1, num_hidden_layers=1, layer_types=[SLIDING], final_logit_softcapping=20.0
    ),
    "phi3": phi3,
    "phi3-longrope": lambda: phi3(
        sliding_window=None,
        original_max_position_embeddings=64,
        rope_parameters={"rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.5, **LONG},
    ),
    "olmo2": olmo2,
    "olmo2-one-kv-head": lambda: olmo2(num_key_value_heads=1, attention_bias=True, hidden_size=160),
    "olmo3": olmo3,
    "glm": glm,
    "glm4": glm4,
    "glm4-biases": lambda: glm4(attention_bias=True, head_dim=24, num_key_value_heads=1, tie_word_embeddings=True),
    "smollm3": smollm3,
    "gemma3-six-layers": lambda: gemma3(
        head_dim=16, sliding_window=5, sliding_window_pattern=6, num_hidden_layers=6, num_key_value_heads=1
    ),
    "smollm3-listed": lambda: smollm3(num_hidden_layers=3, no_rope_layers=[0, 1, 0], tie_word_embeddings=False),
    "granite": granite,
    "granite-biases": lambda: granite(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
}

DENSE_SAMPLE = ["gemma2", "gemma3-all-sliding", "phi3", "olmo2-one-kv-head", "glm4-biases", "granite"]
"""Of them those that differ in how they are computed, for tests of more than one way to compute each."""
