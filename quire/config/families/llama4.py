"""LLaMA 4: attention in chunks in three of four layers, one shared expert as wide as the others."""

from quire.config.families.family import NEVER, Family

FAMILIES = (
    Family(
        "llama4_text",
        ("Llama4ForCausalLM",),
        aliases=("llama4",),
        intermediate=("intermediate_size_mlp", "intermediate_size"),
        mlp_bias=NEVER,
        windows=4,
        window=("sliding_window", "attention_chunk_size"),
        layer_types=("full_attention", "chunked_attention"),
        shares_expert=True,
    ),
)
