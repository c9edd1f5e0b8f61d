"""GLM 4 and its mixtures of experts."""

from quire.config.families.family import NEVER, Bias, Family

FAMILIES = (
    Family("glm4", norms=4, query_bias=Bias("attention_bias", True), output_bias=NEVER, mlp_bias=NEVER),
    Family(
        "glm4_moe",
        output_bias=NEVER,
        mlp_bias=NEVER,
        head_norms="head",
        head_norms_key="use_qk_norm",
        corrects_choice=True,
    ),
)
