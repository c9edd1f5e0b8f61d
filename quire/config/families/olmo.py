"""OLMo 2 and 3, OLMoE."""

from quire.config.families.family import NEVER, Family
from quire.config.rope import RopeDefaults

FAMILIES = (
    Family("olmo2", ("Olmo2ForCausalLM",), is_runnable=True, mlp_bias=NEVER, head_norms="whole"),
    Family(
        "olmo3",
        ("Olmo3ForCausalLM",),
        is_runnable=True,
        mlp_bias=NEVER,
        head_norms="whole",
        windows=4,
        rope=RopeDefaults(theta=500_000.0, local_theta=500_000.0),
        usual_values={"sliding_window": 4096},
    ),
    Family("olmoe", mlp_bias=NEVER, head_norms="whole"),
)
