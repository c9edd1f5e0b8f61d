"""BERT and RoBERTa: encoders with learned positions and a LayerNorm after each block."""

from quire.config.families.family import ALWAYS, Family, GGUFNames

SURPLUS = r"(^|\.)(pooler|cls|lm_head)\.|embeddings\.position_ids$"
"""Tensors that embedding models do not use: other heads, old checkpoints' table of numbers."""


_GGUF = GGUFNames(
    "bert",
    {
        "token_embd": "embeddings.word_embeddings",
        "position_embd": "embeddings.position_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
    },
    {
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    },
    activation="gelu",
    layers="encoder.layer",
)
"""Names for RoBERTa's files too, whose position tables lack the unused rows."""

HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification")


def _family(model_type: str, heads: tuple[str, ...], base: str, unused_positions: int, num_types: int) -> Family:
    """Description of BERT-like encoders. num_types: rows of the table of token types, added to those of positions."""
    name = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta"}[model_type]
    return Family(
        model_type,
        tuple(name + head for head in heads),
        is_runnable=True,
        is_bidirectional=True,
        num_kv_heads=(),
        gated=False,
        tied=True,
        affine=True,
        query_bias=ALWAYS,
        output_bias=ALWAYS,
        mlp_bias=ALWAYS,
        position_rows=unused_positions + num_types,
        unused_positions=unused_positions,
        refused={"is_decoder": (None, False), "add_cross_attention": (None, False)},
        checkpoint_base=base,
        checkpoint_surplus=SURPLUS,
        gguf=_GGUF if model_type == "bert" else None,
    )


FAMILIES = (
    _family("bert", HEADS, "bert.", 0, 2),
    _family("roberta", HEADS, "roberta.", 2, 1),
    _family("xlm-roberta", HEADS, "roberta.", 2, 1),
)
