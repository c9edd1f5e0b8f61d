"""GPT-OSS: sinks, a window in every other layer, experts with biases."""

from quire.config.families.family import EXPERT, NEVER, Bias, Family, GGUFNames
from quire.config.families.llama import GGUF_TOP, LLAMA_VALUES, gguf_experts
from quire.config.rope import RopeDefaults

_GGUF_LAYER = gguf_experts("mlp.router", f"mlp.experts.{EXPERT}", "gate_proj", "up_proj", "down_proj") | {
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
}
_BIAS = Bias("attention_bias", True)
FAMILIES = (
    Family(
        "gpt_oss",
        ("GptOssForCausalLM",),
        is_runnable=True,
        has_experts=True,
        query_bias=_BIAS,
        output_bias=_BIAS,
        mlp_bias=NEVER,
        windows=2,
        expert_bias=True,
        has_sinks=True,
        rope=RopeDefaults(
            theta=150_000.0,
            settings={
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        ),
        usual_values={name: value for name, value in LLAMA_VALUES.items() if name != "hidden_act"}
        | {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "sliding_window": 128,
            "layer_types": None,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        renamed={"num_experts": "num_local_experts"},
        gguf=GGUFNames(
            "gpt-oss",
            GGUF_TOP,
            {name: place for name, place in _GGUF_LAYER.items() if name != "ffn_norm"},
            windowed="GptOssForCausalLM",
            settings={"experts_apart": True},
            rope={"truncate": False},
        ),
    ),
)
