"""OLMo 2 and 3, OLMoE."""

from quire.config.families.family import NEVER, Family
from quire.config.families.llama import LLAMA_VALUES
from quire.config.rope import RopeDefaults

_VALUES = LLAMA_VALUES | {"rms_norm_eps": 1e-5, "attention_bias": False}
FAMILIES = (
    Family(
        "olmo2",
        ("Olmo2ForCausalLM",),
        is_runnable=True,
        mlp_bias=NEVER,
        head_norms="whole",
        usual_values=_VALUES,
    ),
    Family(
        "olmo3",
        ("Olmo3ForCausalLM",),
        is_runnable=True,
        mlp_bias=NEVER,
        head_norms="whole",
        windows=4,
        rope=RopeDefaults(theta=500_000.0, local_theta=500_000.0),
        usual_values=_VALUES | {"sliding_window": 4096, "layer_types": None},
    ),
    Family("olmoe", mlp_bias=NEVER, head_norms="whole"),
)
