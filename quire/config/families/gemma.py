"""Gemma 1 to 3: large heads, and from the second on four norms a layer and windows in most layers."""

from quire.config.families.family import NEVER, Family

FAMILIES = (
    Family("gemma", ("GemmaForCausalLM",), tied=True, mlp_bias=NEVER, head_dim=256),
    Family("gemma2", ("Gemma2ForCausalLM",), tied=True, mlp_bias=NEVER, head_dim=256, norms=4, windows=2),
    Family(
        "gemma3_text",
        ("Gemma3ForCausalLM",),
        aliases=("gemma3",),
        tied=True,
        mlp_bias=NEVER,
        head_dim=256,
        norms=4,
        head_norms="head",
        windows=6,
    ),
)
