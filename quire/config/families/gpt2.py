"""GPT-2: learned positions, and names of its own for every size."""

from quire.config.families.family import ALWAYS, Family

FAMILIES = (
    Family(
        "gpt2",
        ("GPT2LMHeadModel",),
        is_runnable=True,
        hidden_size=("n_embd",),
        num_layers=("n_layer",),
        num_heads=("n_head",),
        num_kv_heads=(),
        max_positions=("n_positions",),
        intermediate=("n_inner",),
        intermediate_factor=4,
        gated=False,
        tied=True,
        affine=True,
        query_bias=ALWAYS,
        output_bias=ALWAYS,
        mlp_bias=ALWAYS,
        position_rows=0,
        checkpoint_base="transformer.",
        # Old checkpoints carry the causal mask as a tensor of each layer.
        checkpoint_surplus=r"\.attn\.(masked_)?bias$",
    ),
)
