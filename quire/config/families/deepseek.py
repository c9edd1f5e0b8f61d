"""DeepSeek V2 and V3, R1, Kimi K2: latent attention, routed and shared experts."""

from quire.config.families.family import NEVER, Family

FAMILIES = (
    Family("deepseek_v2", ("DeepseekV2ForCausalLM",), is_runnable=True, has_latents=True, has_experts=True),
    Family(
        "deepseek_v3",
        ("DeepseekV3ForCausalLM",),
        aliases=("kimi_k2",),
        is_runnable=True,
        has_latents=True,
        has_experts=True,
        mlp_bias=NEVER,
        corrects_choice=True,
    ),
)
