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
        usual_values={
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "tie_word_embeddings": True,
        },
        renamed={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        refused={"add_cross_attention": (False,)},
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
