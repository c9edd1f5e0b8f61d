"""BERT and RoBERTa: encoders with learned positions and a LayerNorm behind each block."""

from quire.config.families.family import ALWAYS, Family

SURPLUS = r"(^|\.)(pooler|cls|lm_head)\.|embeddings\.position_ids$"
"""Heads that the model of a text's vector does not have, and a table of numbers that old checkpoints carry."""


HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification")


def _family(model_type: str, heads: tuple[str, ...], base: str, unused_positions: int, num_types: int) -> Family:
    """num_types: rows of the table of token types, which counts with that of positions."""
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
    )


FAMILIES = (
    _family("bert", HEADS, "bert.", 0, 2),
    _family("roberta", HEADS, "roberta.", 2, 1),
    _family("xlm-roberta", HEADS, "roberta.", 2, 1),
)
