"""Phi 3 and 4: query, key and value in one tensor, gate and up in one."""

from quire.config.families.family import NEVER, Family

FAMILIES = (
    Family(
        "phi3",
        ("Phi3ForCausalLM",),
        is_runnable=True,
        query_bias=NEVER,
        output_bias=NEVER,
        mlp_bias=NEVER,
        windows="everywhere",
        fused=("qkv_proj", "gate_up_proj"),
    ),
)
