"""Qwen 2, 2.5 and 3, dense and mixtures of experts."""

from quire.config.families.family import ALWAYS, EXPERT, NEVER, Bias, Family, GGUFNames
from quire.config.families.llama import GGUF_LAYER, GGUF_TOP, gguf_experts

_GGUF_EXPERTS = gguf_experts("mlp.gate", f"mlp.experts.{EXPERT}", "gate_proj", "up_proj", "down_proj")
GGUF_SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
FAMILIES = (
    Family(
        "qwen2",
        ("Qwen2ForCausalLM", "Qwen2Model", "Qwen2ForSequenceClassification"),
        is_runnable=True,
        query_bias=ALWAYS,
        output_bias=NEVER,
        mlp_bias=NEVER,
        windows="qwen",
        gguf=GGUFNames("qwen2", GGUF_TOP, GGUF_LAYER),
    ),
    Family(
        "qwen2_moe",
        ("Qwen2MoeForCausalLM",),
        is_runnable=True,
        has_experts=True,
        query_bias=Bias("qkv_bias", True),
        output_bias=NEVER,
        mlp_bias=NEVER,
        windows="qwen",
        has_shared_gate=True,
        gguf=GGUFNames("qwen2moe", GGUF_TOP, _GGUF_EXPERTS | GGUF_SHARED, settings={"norm_topk_prob": False}),
    ),
    Family(
        "qwen3",
        ("Qwen3ForCausalLM", "Qwen3Model", "Qwen3ForSequenceClassification"),
        is_runnable=True,
        mlp_bias=NEVER,
        head_norms="head",
        head_dim=128,
        windows="qwen",
        gguf=GGUFNames("qwen3", GGUF_TOP, GGUF_LAYER),
    ),
    Family(
        "qwen3_moe",
        ("Qwen3MoeForCausalLM",),
        is_runnable=True,
        has_experts=True,
        mlp_bias=NEVER,
        head_norms="head",
        windows="if",
        usual_values={"sliding_window": 4096},
        gguf=GGUFNames("qwen3moe", GGUF_TOP, _GGUF_EXPERTS, settings={"norm_topk_prob": True}),
    ),
)
