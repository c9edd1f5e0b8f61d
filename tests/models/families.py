"""Tiny random models of every family, as Transformers builds them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import NamedTuple
from unittest.mock import patch

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

from tests.models.dense_families import DENSE_FAMILIES
from tests.models.hybrid_families import HYBRID_FAMILIES

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def gpt2(**options: object) -> PreTrainedModel:
    sizes = {"vocab_size": 97, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **options}))


def opt(**options: object) -> PreTrainedModel:
    sizes = {
        "vocab_size": 97,
        "hidden_size": 48,
        "ffn_dim": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    return OPTForCausalLM(OPTConfig(**{**sizes, **options}))


def llama(**options: object) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **options}))


def rope(rope_type: str, **settings: object) -> PreTrainedModel:
    parameters = {"rope_type": rope_type, "rope_theta": 500.0, **settings}
    return llama(rope_parameters=parameters, num_hidden_layers=2)


def mistral(**options: object) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**{**SMALL, **options}))


def qwen2(**options: object) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**{**SMALL, **options}))


def qwen3(**options: object) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**{**SMALL, "head_dim": 16, **options}))


LATENT = {
    **SMALL,
    "num_key_value_heads": 6,
    "q_lora_rank": 32,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 40,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
ONE_GROUP = {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}


def deepseek_v2(**options: object) -> PreTrainedModel:
    return DeepseekV2ForCausalLM(DeepseekV2Config(**{**LATENT, **options}))


def deepseek_v3(**options: object) -> PreTrainedModel:
    return _corrected(DeepseekV3ForCausalLM(DeepseekV3Config(**{**LATENT, **options})))


def _corrected(model: PreTrainedModel) -> PreTrainedModel:
    """With corrections of the choice of experts that change it."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer)).roll(3))
    return model


def deepseek_v32(**options: object) -> PreTrainedModel:
    index = {"index_n_heads": 3, "index_head_dim": 16, "index_topk": 21, "pad_token_id": None}
    turned = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    model = _corrected(DeepseekV32ForCausalLM(DeepseekV32Config(**{**LATENT, **index, **turned, **options})))
    make_choices_stable(model)
    return model


def make_choices_stable(model: PreTrainedModel) -> None:
    """Let the indexers of the model take the first of keys that are equally good."""
    for module in model.modules():
        if isinstance(module, DeepseekV32Indexer):
            module.forward = _with_stable_topk(module.forward)  # type: ignore[method-assign]


def _with_stable_topk(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Keys that no head is drawn to have a score of 0, all the same: of these, torch's topk takes any."""

    class Best(NamedTuple):
        indices: torch.Tensor

    def topk(scores: torch.Tensor, count: int, dim: int) -> Best:
        return Best(scores.sort(dim=dim, descending=True, stable=True).indices[..., :count])

    @wraps(forward)
    def stable(*args: object, **kwargs: object) -> torch.Tensor:
        with patch.object(torch.Tensor, "topk", topk):
            return forward(*args, **kwargs)

    return stable


TWO_LAYERS = {"num_hidden_layers": 2}


def mixtral(num_experts: int, num_active: int, **options: object) -> PreTrainedModel:
    experts = {
        "num_local_experts": num_experts,
        "num_experts_per_tok": num_active,
        "intermediate_size": 36,
    } | TWO_LAYERS
    return MixtralForCausalLM(MixtralConfig(**{**SMALL, **experts, **options}))


ROUTED = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "num_hidden_layers": 2}


def qwen2_moe(**options: object) -> PreTrainedModel:
    shared = {"shared_expert_intermediate_size": 28}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**{**SMALL, **ROUTED, **shared, **options}))


def qwen3_moe(**options: object) -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SMALL, **ROUTED, "head_dim": 16, **options}))


def llama4(**options: object) -> PreTrainedModel:
    sizes = {"intermediate_size": 36, "intermediate_size_mlp": 52, "num_local_experts": 5, "head_dim": 16}
    chunks = {"attention_chunk_size": 24, "no_rope_layer_interval": 2, "floor_scale": 10, "attn_scale": 0.3}
    turned = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    return Llama4ForCausalLM(Llama4TextConfig(**{**SMALL, **sizes, **chunks, **turned, **options}))


def gpt_oss(**options: object) -> PreTrainedModel:
    sizes = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 36, "head_dim": 16}
    yarn = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
    rotation = yarn | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    options = {"sliding_window": 18, "rope_parameters": rotation, **options}
    return GptOssForCausalLM(GptOssConfig(**{**SMALL, **TWO_LAYERS, **sizes, **options}))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": gpt2,
    "gpt2-variant": lambda: gpt2(
        n_inner=101, tie_word_embeddings=False, scale_attn_by_inverse_layer_idx=True, activation_function="gelu"
    ),
    "opt": opt,
    "opt-350m": lambda: opt(word_embed_proj_dim=32, do_layer_norm_before=False, activation_function="gelu"),
    "opt-bare": lambda: opt(enable_bias=False, layer_norm_elementwise_affine=False, tie_word_embeddings=False),
    "deepseek-v2": lambda: deepseek_v2(q_lora_rank=None),
    "deepseek-v2-one-expert": lambda: deepseek_v2(n_routed_experts=1, num_experts_per_tok=1),
    "deepseek-v2-groups": lambda: deepseek_v2(
        attention_bias=True, topk_method="group_limited_greedy", routed_scaling_factor=1.5
    ),
    "deepseek-v3": deepseek_v3,
    "deepseek-v3-plain": lambda: deepseek_v3(
        q_lora_rank=None,
        rope_interleave=False,
        attention_bias=True,
        n_routed_experts=2,
        num_experts_per_tok=1,
        **ONE_GROUP,
    ),
    "deepseek-v3-yarn": lambda: deepseek_v3(
        rope_parameters=YARN,
        num_experts_per_tok=8,
        topk_group=4,
    ),
    "deepseek-v3.2": lambda: deepseek_v32(num_hidden_layers=2),
    "deepseek-v3.2-all-read": lambda: deepseek_v32(index_topk=256, num_hidden_layers=2),
    "deepseek-v3.2-yarn": lambda: deepseek_v32(
        rope_parameters=YARN,
        index_topk=1,
        index_n_heads=12,
        index_head_dim=8,
        num_hidden_layers=2,
    ),
    "llama-wide": lambda: llama(hidden_size=64, intermediate_size=128, num_attention_heads=4),
    "llama": lambda: llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    "llama-biases": lambda: llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=12),
    "llama-one-kv-head": lambda: llama(num_key_value_heads=1, num_attention_heads=8, hidden_act="gelu_new"),
    "llama-linear": lambda: rope("linear", factor=4.0),
    "llama-dynamic": lambda: rope("dynamic", factor=2.0),
    "llama-yarn": lambda: rope("yarn", factor=4.0, original_max_position_embeddings=64),
    "llama-yarn-mscale": lambda: rope(
        "yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.4, truncate=False
    ),
    "llama-yarn-attention-factor": lambda: rope(
        "yarn", factor=2.0, original_max_position_embeddings=128, attention_factor=0.9, beta_fast=16.0, beta_slow=2.0
    ),
    "llama-llama3": lambda: rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "mistral": lambda: mistral(sliding_window=24),
    "mistral-no-window": lambda: mistral(sliding_window=None, head_dim=20),
    "qwen2": qwen2,
    "qwen2-window": lambda: qwen2(use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "qwen3": qwen3,
    "qwen3-window": lambda: qwen3(
        use_sliding_window=True,
        sliding_window=20,
        attention_bias=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "mixtral": lambda: mixtral(5, 2),
    "mixtral-one-expert": lambda: mixtral(1, 1, sliding_window=24, tie_word_embeddings=True),
    "mixtral-all-experts": lambda: mixtral(3, 3),
    "qwen2-moe": lambda: qwen2_moe(mlp_only_layers=[1]),
    "qwen2-moe-renormalised": lambda: qwen2_moe(norm_topk_prob=True, qkv_bias=False, decoder_sparse_step=2),
    "qwen3-moe": lambda: qwen3_moe(norm_topk_prob=True),
    "qwen3-moe-window": lambda: qwen3_moe(use_sliding_window=True, sliding_window=20),
    "qwen3-moe-one-active": lambda: qwen3_moe(num_experts_per_tok=1, tie_word_embeddings=True),
    "llama4": llama4,
    "llama4-interleaved": lambda: llama4(
        interleave_moe_layer_step=2,
        num_experts_per_tok=2,
        use_qk_norm=False,
        attention_bias=True,
        attention_chunk_size=7,
        num_key_value_heads=1,
        no_rope_layers=[1, 1, 0],
        tie_word_embeddings=True,
    ),
    "llama4-llama3-rotation": lambda: llama4(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        attn_temperature_tuning=False,
        attention_chunk_size=64,
        **TWO_LAYERS,
    ),
    "gpt-oss": lambda: gpt_oss(swiglu_limit=0.8),
    **DENSE_FAMILIES,
    **HYBRID_FAMILIES,
}
