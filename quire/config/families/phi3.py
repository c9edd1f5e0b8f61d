"""Phi 3 and 4: queries, keys and values in one tensor, gate and up in one."""

from quire.config.families.family import NEVER, Family
from quire.config.families.llama import LLAMA_VALUES
from quire.config.rope import RopeDefaults

FAMILIES = (
    Family(
        "phi3",
        ("Phi3ForCausalLM",),
        is_runnable=True,
        query_bias=NEVER,
        output_bias=NEVER,
        mlp_bias=NEVER,
        windows="everywhere",
        rope=RopeDefaults(
            turns_part=True, types=("default", "longrope"), renamed={"su": "longrope", "yarn": "longrope"}
        ),
        usual_values=LLAMA_VALUES
        | {
            "rms_norm_eps": 1e-5,
            "original_max_position_embeddings": 4096,
            "sliding_window": None,
        },
        fused=("qkv_proj", "gate_up_proj"),
    ),
)
