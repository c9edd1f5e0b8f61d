"""DeepSeek V2 to V3.2, R1, Kimi K2: latent attention, routed and shared experts."""

from dataclasses import replace

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
_V3 = Family(
    "deepseek_v3",
    ("DeepseekV3ForCausalLM",),
    aliases=("kimi_k2",),
    is_runnable=True,
    has_latents=True,
    has_experts=True,
    mlp_bias=NEVER,
    corrects_choice=True,
    gguf=replace(_GGUF, gating=2),
)
FAMILIES = (
    Family(
        "deepseek_v2",
        ("DeepseekV2ForCausalLM",),
        is_runnable=True,
        has_latents=True,
        has_experts=True,
        gguf=replace(_GGUF, gating=1),
    ),
    _V3,
    replace(
        _V3,
        model_type="deepseek_v32",
        architectures=("DeepseekV32ForCausalLM",),
        aliases=(),
        has_index=True,
        sparse_from=3,
        gguf=None,
    ),
)
