"""Every key of Transformers' configuration classes: read, refused, or known to mean nothing for the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig

from quire.config.families import FAMILIES, known_values, read_shape
from quire.config.families.keys import REFUSED, known_keys
from quire.errors import ModelLoadError

RUN = tuple(name for name, family in FAMILIES.items() if family.is_runnable)
DECODERS = tuple(name for name in RUN if FAMILIES[name].usual_values)
IDLE = frozenset(
    {
        # Training: the first values of weights, what is dropped at random, losses, what a step keeps and returns.
        "initializer_range", "init_std", "initializer_cutoff_factor", "attention_dropout", "hidden_dropout_prob",
        "attention_probs_dropout_prob", "classifier_dropout", "embedding_dropout", "mlp_dropout", "dropout",
        "layerdrop", "attn_pdrop", "embd_pdrop", "resid_pdrop", "router_aux_loss_coef", "router_jitter_noise",
        "output_router_logits", "use_cache",
        "pretraining_tp", "sparse_prediction", "sparse_pred_ignore_index", "deterministic_flash_attn",
        # Ids of tokens: those that end a text are read beside this (quire/config/hf_config.py).
        "bos_token_id", "pad_token_id", "cls_token_id", "sep_token_id",
        # The head of GPT2DoubleHeadsModel.
        "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    }
)  # fmt: skip
OWN_IDLE: Mapping[str, frozenset[str]] = {
    "gpt2": frozenset({"reorder_and_upcast_attn"}),  # the same products in float32, as Quire's are
    "gpt_oss": frozenset({"hidden_act"}),  # the experts' activation is fixed
    "deepseek_v2": frozenset({"head_dim"}),  # qk_rope_head_dim in its place
    "deepseek_v32": frozenset({"head_dim", "mlp_bias", "layer_types"}),  # no MLP has a bias; kinds of caches
    "bert": frozenset({"tie_word_embeddings"}),  # of the head for masked words, which is not run
    "roberta": frozenset({"tie_word_embeddings"}),
    "xlm-roberta": frozenset({"tie_word_embeddings"}),
    "modernbert": frozenset({"tie_word_embeddings", "decoder_bias"}),
}
_BERT = frozenset({"hidden_act", "layer_norm_eps", "type_vocab_size"})
ENCODERS_READ: Mapping[str, frozenset[str]] = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "modernbert": frozenset(
        {
            "attention_bias", "mlp_bias", "norm_bias", "norm_eps", "hidden_activation", "local_attention",
            "layer_types", "classifier_activation", "classifier_bias", "classifier_pooling",
        }
    ),
}  # fmt: skip
"""What the code of encoders reads (quire/models/bert.py, modernbert.py)."""
NOT_FIELDS = frozenset(
    {
        "head_dim", "sliding_window_pattern", "full_attention_interval", "scoring_func", "topk_method",
        "num_nextn_predict_layers", "tie_word_embeddings",
    }
)  # fmt: skip
"""Keys that are read and that classes take without a field."""
OF_ALL = frozenset(field.name for field in dataclasses.fields(PreTrainedConfig))
"""Fields of every class: what a call returns, names, dtypes and labels, which are read beside this."""
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 100, "ffn_dim": 100, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "num_experts_per_tok": 2,
}  # fmt: skip


def fields_of(name: str) -> dict[str, Any]:
    """The fields of a family's class and their usual values."""
    return {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[name])}


@pytest.mark.parametrize("name", RUN)
def test_every_key_of_transformers_is_in_a_table(name: str) -> None:
    family, described = FAMILIES[name], CONFIG_MAPPING[name]
    told = known_keys(family) | {*family.renamed, *family.refused, *REFUSED}
    told |= IDLE | OWN_IDLE.get(name, frozenset()) | ENCODERS_READ.get(name, frozenset()) | OF_ALL
    assert {*fields_of(name), *described.attribute_map} - told == set()


@pytest.mark.parametrize("name", DECODERS)
def test_usual_values_are_those_of_transformers(name: str) -> None:
    family, fields = FAMILIES[name], fields_of(name)
    for key, usual in family.usual_values.items():
        assert (key in fields and fields[key] == usual) or key in NOT_FIELDS - fields.keys(), key
    theta = CONFIG_MAPPING[name].default_theta
    theta, local = (theta["global"], theta["local"]) if isinstance(theta, dict) else (theta, theta)
    assert family.position_rows is not None or family.rope.theta == theta
    assert family.rope.local_theta in (None, local)


@pytest.mark.parametrize("name", DECODERS)
def test_other_names_are_those_of_transformers(name: str) -> None:
    """Where a class names the standard key as the one that is read, the other way round."""
    renamed = FAMILIES[name].renamed
    for other, key in CONFIG_MAPPING[name].attribute_map.items():
        assert renamed.get(other) == key or renamed.get(key) == other


@pytest.mark.parametrize("name", DECODERS)
def test_null_is_refused_where_a_value_is_needed(name: str) -> None:
    family = FAMILIES[name]
    for key, usual in family.usual_values.items():
        values = {**SIZES, "model_type": name, key: None}
        if usual is None or key in family.nullable:
            assert known_values(values, "x")[key] is None
            continue
        with pytest.raises(ModelLoadError, match=f"x: {key} must not be null"):
            known_values(values, "x")


@pytest.mark.parametrize("name", RUN)
def test_refused_keys_are_named(name: str) -> None:
    family = FAMILIES[name]
    for key, neutral in ({**REFUSED, **family.refused} if name in DECODERS else family.refused).items():
        values = {**SIZES, "model_type": name}
        for value in neutral:
            known_values({**values, key: value}, "x")
        with pytest.raises(ModelLoadError, match=f"x: {key} 0.5 is not supported"):
            known_values({**values, key: 0.5}, "x")


@pytest.mark.parametrize(
    ("name", "values", "windows"),
    [
        ("gemma3_text", {"sliding_window_pattern": 3, "_sliding_window_pattern": 2}, (8, 8, None, 8)),
        ("gemma3_text", {"_sliding_window_pattern": 2}, (8, 8, 8, 8)),
        ("gemma2", {"sliding_window_pattern": 4}, (8, None, 8, None)),
        ("mistral", {"layer_types": ["full_attention"] * 4, "sliding_window_pattern": 2}, (8,) * 4),
        ("qwen3_moe", {"use_sliding_window": True, "layer_types": ["full_attention"] * 4}, (8,) * 4),
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 3}, (8, None, 8, None)),
        ("smollm3", {"use_sliding_window": True, "max_window_layers": 0}, (None, None, None, 8)),
        ("smollm3", {"layer_types": ["sliding_attention", "full_attention"] * 2}, (8, None, 8, None)),
        ("gpt_oss", {"sliding_window_pattern": 4}, (8, None, 8, None)),
        ("olmo3", {"no_rope_layer_interval": 2}, (8, 8, 8, None)),
    ],
)
def test_windows(name: str, values: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read_shape({**SIZES, "model_type": name, "sliding_window": 8, **values}).windows == windows


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("gemma3_text", {"sliding_window": None}, "sliding_window must not be null"),
        ("olmo3", {"sliding_window": 0}, "sliding_window is 0, and layers of the model have a window"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0, and layers"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window is false, and layers"),
        ("llama4_text", {"attention_chunk_size": None}, "attention_chunk_size must not be null"),
    ],
)
def test_windows_without_a_size_are_refused(name: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_shape({**SIZES, "model_type": name, **values})


def test_another_name_of_a_key_counts() -> None:
    values = {**SIZES, "model_type": "mixtral", "num_local_experts": 5, "num_experts": 3}
    assert read_shape(values).experts.num_experts == 3  # type: ignore[union-attr]
    values = {"vocab_size": 97, "n_embd": 48, "hidden_size": 64, "num_hidden_layers": 2, "n_head": 4, "n_positions": 64}
    shape = read_shape({"model_type": "gpt2", **values})
    assert (shape.hidden, shape.num_layers) == (64, 2)
