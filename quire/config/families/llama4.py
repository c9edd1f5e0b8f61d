"""LLaMA 4: attention in chunks in three of four layers, the others not rotated; a shared expert."""

from quire.config.families.family import NEVER, Family
from quire.config.families.llama import LLAMA_VALUES
from quire.config.rope import RopeDefaults

FAMILIES = (
    Family(
        "llama4_text",
        ("Llama4ForCausalLM",),
        aliases=("llama4",),
        is_runnable=True,
        intermediate=("intermediate_size_mlp", "intermediate_size"),
        mlp_bias=NEVER,
        head_dim=128,
        windows=4,
        window=("attention_chunk_size",),
        layer_types=("full_attention", "chunked_attention"),
        has_chunks=True,
        has_experts=True,
        shares_expert=True,
        rope=RopeDefaults(theta=500_000.0, skips_rotation=True),
        is_interleaved=True,
        usual_values=LLAMA_VALUES
        | {
            "vocab_size": 202_048,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16_384,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": False,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 1,
            "num_local_experts": 16,
            "moe_layers": None,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": True,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "layer_types": None,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
    ),
)
