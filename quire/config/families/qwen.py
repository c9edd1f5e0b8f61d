"""Qwen 2, 2.5 and 3, dense and mixtures of experts, and the language models of Qwen2.5-VL and Qwen3-VL."""

from quire.config.families.family import ALWAYS, EXPERT, NEVER, Bias, Family, GGUFNames
from quire.config.families.llama import GGUF_LAYER, GGUF_TOP, LLAMA_VALUES, gguf_experts
from quire.config.rope import RopeDefaults

_GGUF_EXPERTS = gguf_experts("mlp.gate", f"mlp.experts.{EXPERT}", "gate_proj", "up_proj", "down_proj")
GGUF_SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_VALUES = LLAMA_VALUES | {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_MIXTURE_VALUES = {"decoder_sparse_step": 1, "mlp_only_layers": None}
_EXPERT_VALUES = _MIXTURE_VALUES | {"norm_topk_prob": False}
_VISION_VALUES = {"attention_bias": False}
_VISION_ROPE = RopeDefaults(theta=500_000.0, mrope_section=(24, 20, 20), mrope_interleaved=True)
FAMILIES = (
    Family(
        "qwen2",
        ("Qwen2ForCausalLM", "Qwen2Model", "Qwen2ForSequenceClassification"),
        is_runnable=True,
        query_bias=ALWAYS,
        output_bias=NEVER,
        mlp_bias=NEVER,
        windows="qwen",
        usual_values=_VALUES,
        nullable=("num_key_value_heads", "sliding_window"),
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
        windows="qwen_moe",
        has_shared_gate=True,
        usual_values=_VALUES
        | _EXPERT_VALUES
        | {
            "num_key_value_heads": 16,
            "qkv_bias": True,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
        },
        nullable=("num_key_value_heads", "sliding_window"),
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
        usual_values=_VALUES | {"head_dim": 128, "attention_bias": False},
        nullable=("num_key_value_heads", "sliding_window"),
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
        usual_values=LLAMA_VALUES
        | _EXPERT_VALUES
        | {
            "num_key_value_heads": 4,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        nullable=("sliding_window",),
        renamed={"num_local_experts": "num_experts"},
        gguf=GGUFNames("qwen3moe", GGUF_TOP, _GGUF_EXPERTS, settings={"norm_topk_prob": True}),
    ),
    # Transformers has no class of these language models alone: the names are Quire's.
    Family(
        "qwen2_5_vl_text",
        ("Qwen2_5_VLForCausalLM",),
        aliases=("qwen2_5_vl",),
        is_runnable=True,
        query_bias=ALWAYS,
        output_bias=NEVER,
        mlp_bias=NEVER,
        windows="qwen",
        rope=RopeDefaults(theta=1_000_000.0, mrope_section=(16, 24, 24), renamed={"mrope": "default"}),
        usual_values=_VALUES | {"num_key_value_heads": 8, "max_window_layers": 80, "rms_norm_eps": 1e-5},
        nullable=("num_key_value_heads", "sliding_window"),
        gguf=GGUFNames("qwen2vl", GGUF_TOP, GGUF_LAYER),
    ),
    Family(
        "qwen3_vl_text",
        ("Qwen3VLForCausalLM",),
        aliases=("qwen3_vl",),
        is_runnable=True,
        mlp_bias=NEVER,
        head_norms="head",
        head_dim=128,
        rope=_VISION_ROPE,
        usual_values=LLAMA_VALUES | _VISION_VALUES | {"num_key_value_heads": 32, "head_dim": 128},
        nullable=("num_key_value_heads",),
        gguf=GGUFNames("qwen3vl", GGUF_TOP, GGUF_LAYER),
    ),
    Family(
        "qwen3_vl_moe_text",
        ("Qwen3VLMoeForCausalLM",),
        aliases=("qwen3_vl_moe",),
        is_runnable=True,
        has_experts=True,
        mlp_bias=NEVER,
        head_norms="head",
        tied=True,
        rope=_VISION_ROPE,
        usual_values=LLAMA_VALUES
        | _VISION_VALUES
        | _MIXTURE_VALUES
        | {
            "num_key_value_heads": 16,
            "tie_word_embeddings": True,
            "moe_intermediate_size": 1408,
            "num_experts": 60,
            "num_experts_per_tok": 4,
        },
        nullable=("num_key_value_heads",),
        renamed={"num_local_experts": "num_experts"},
        gguf=GGUFNames("qwen3vlmoe", GGUF_TOP, _GGUF_EXPERTS),
    ),
)
