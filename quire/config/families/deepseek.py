"""DeepSeek V2 to V3.2, R1, Kimi K2: latent attention, routed and shared experts."""

from dataclasses import replace

from quire.config.families.family import NEVER, Family

_V3 = Family(
    "deepseek_v3",
    ("DeepseekV3ForCausalLM",),
    aliases=("kimi_k2",),
    is_runnable=True,
    has_latents=True,
    has_experts=True,
    mlp_bias=NEVER,
    corrects_choice=True,
)
FAMILIES = (
    Family("deepseek_v2", ("DeepseekV2ForCausalLM",), is_runnable=True, has_latents=True, has_experts=True),
    _V3,
    replace(
        _V3,
        model_type="deepseek_v32",
        architectures=("DeepseekV32ForCausalLM",),
        aliases=(),
        has_index=True,
        sparse_from=3,
    ),
)
