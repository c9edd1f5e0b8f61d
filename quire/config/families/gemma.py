"""Gemma 1 to 3: large heads, and from the second on four norms a layer and windows in most layers."""

from quire.config.families.family import NEVER, Family
from quire.config.rope import RopeDefaults

FAMILIES = (
    Family(
        "gemma",
        ("GemmaForCausalLM",),
        is_runnable=True,
        tied=True,
        mlp_bias=NEVER,
        head_dim=256,
        usual_values={"hidden_act": "gelu_pytorch_tanh"},
    ),
    Family(
        "gemma2",
        ("Gemma2ForCausalLM",),
        is_runnable=True,
        tied=True,
        mlp_bias=NEVER,
        head_dim=256,
        norms=4,
        windows=2,
        usual_values={
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    Family(
        "gemma3_text",
        ("Gemma3ForCausalLM",),
        aliases=("gemma3",),
        is_runnable=True,
        tied=True,
        mlp_bias=NEVER,
        head_dim=256,
        norms=4,
        head_norms="head",
        windows=6,
        rope=RopeDefaults(theta=1_000_000.0, local_theta=10_000.0, local_key="rope_local_base_freq"),
        usual_values={
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "max_position_embeddings": 131_072,
        },
    ),
)
