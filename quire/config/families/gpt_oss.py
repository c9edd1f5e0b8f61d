"""GPT-OSS: sinks, a window in every other layer, experts with biases."""

from quire.config.families.family import EXPERT, NEVER, Bias, Family, GGUFNames
from quire.config.families.llama import GGUF_TOP, gguf_experts
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
        rope=RopeDefaults(theta=150_000.0),
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
