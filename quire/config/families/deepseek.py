"""DeepSeek V2 to V3.2, R1, Kimi K2: latent attention, routed and shared experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.config.families.family import EXPERT, HEAD, NEVER, Family, GGUFNames
from quire.config.families.llama import GGUF_LAYER, GGUF_TOP, gguf_experts

_GGUF_LAYER = {
    **{name: place for name, place in GGUF_LAYER.items() if name not in ("attn_k", "attn_v")},
    **gguf_experts("mlp.gate", f"mlp.experts.{EXPERT}", "gate_proj", "up_proj", "down_proj"),
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": f"self_attn.k_b_proj.{HEAD}",
    "attn_v_b": f"self_attn.v_b_proj.{HEAD}",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_GGUF = GGUFNames("deepseek2", GGUF_TOP, _GGUF_LAYER)
_VALUES: dict[str, Any] = {
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_V3_VALUES = _VALUES | {
    "num_key_value_heads": 128,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
"""Usual values of V3; others of `scoring_func` and `topk_method`, which Transformers ignores, are refused."""
_V2_VALUES = _VALUES | {
    "mlp_bias": False,
    "first_k_dense_replace": 0,
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": None,
    "n_group": None,
    "topk_group": None,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
}
_V3 = Family(
    "deepseek_v3",
    ("DeepseekV3ForCausalLM",),
    aliases=("kimi_k2",),
    is_runnable=True,
    has_latents=True,
    has_experts=True,
    mlp_bias=NEVER,
    corrects_choice=True,
    usual_values=_V3_VALUES | {"rope_interleave": True, "num_nextn_predict_layers": 1},
    nullable=("num_key_value_heads", "q_lora_rank"),
    draft_layer="eh_proj.weight",
    renamed={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    gguf=replace(_GGUF, gating=2),
)
FAMILIES = (
    Family(
        "deepseek_v2",
        ("DeepseekV2ForCausalLM",),
        is_runnable=True,
        has_latents=True,
        has_experts=True,
        usual_values=_V2_VALUES,
        nullable=("q_lora_rank",),
        renamed={"num_experts": "n_routed_experts"},
        gguf=replace(_GGUF, gating=1),
    ),
    _V3,
    replace(
        _V3,
        model_type="deepseek_v32",
        architectures=("DeepseekV32ForCausalLM",),
        aliases=(),
        has_index=True,
        usual_values=_V3_VALUES
        | {
            "mlp_layer_types": None,
            "index_topk": 2048,
            "index_head_dim": 128,
            "index_n_heads": 64,
            "num_nextn_predict_layers": 0,
        },
        nullable=(),
        renamed={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
        gguf=None,
    ),
)
