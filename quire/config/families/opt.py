"""OPT: learned positions, two rows after their number; embeddings may be narrower than layers."""

from quire.config.families.family import Bias, Family

_BIAS = Bias("enable_bias", True)
FAMILIES = (
    Family(
        "opt",
        ("OPTForCausalLM",),
        is_runnable=True,
        num_kv_heads=(),
        intermediate=("ffn_dim",),
        embedding_width=("word_embed_proj_dim",),
        gated=False,
        tied=True,
        affine=True,
        query_bias=_BIAS,
        output_bias=_BIAS,
        mlp_bias=_BIAS,
        position_rows=2,
        usual_values={
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "word_embed_proj_dim": None,
            "activation_function": "relu",
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "tie_word_embeddings": True,
        },
        checkpoint_surplus=r"(?!)",
    ),
)
