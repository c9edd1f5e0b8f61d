"""OLMo 2 and 3, OLMoE."""

from quire.config.families.family import NEVER, Family

FAMILIES = (
    Family("olmo2", mlp_bias=NEVER, head_norms="whole"),
    Family("olmo3", mlp_bias=NEVER, head_norms="whole", windows=4, rope_theta=500_000.0),
    Family("olmoe", mlp_bias=NEVER, head_norms="whole"),
)
