"""GPT-OSS: sinks, a window in every other layer, experts with biases."""

from quire.config.families.family import NEVER, Bias, Family
from quire.config.rope import RopeDefaults

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
    ),
)
