"""Reading of a family's keys in config.json, as Transformers' configuration class does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.families.family import Family
from quire.config.hf_json import Fields, shown

ROTATION_KEYS = frozenset({"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"})
SHARED_KEYS = frozenset(
    {
        "architectures", "model_type", "dtype", "torch_dtype", "quantization_config", "eos_token_id", "vocab_size",
        "original_max_position_embeddings",
        # Keys of classifiers and of models that make vectors.
        "id2label", "label2id", "num_labels", "problem_type", "matryoshka_dimensions", "is_matryoshka",
        "sentence_transformers", "sbert_ce_default_activation_function",
        # Keys that mark how a GGUF file's tensors differ from a checkpoint's.
        "experts_apart", "projections_apart", "expansion_apart",
    }
)  # fmt: skip
REFUSED: Mapping[str, tuple[object, ...]] = {"is_causal": (True,), "per_layer_config": (None, {})}
"""Unsupported keys of every decoder in Transformers -> values that change nothing."""


def sizes(family: Family) -> tuple[str, ...]:
    """Required keys, with their alternatives."""
    return (
        *family.hidden_size,
        *family.num_layers,
        *family.num_heads,
        *family.max_positions,
        *family.intermediate,
    )


def known_keys(family: Family) -> frozenset[str]:
    rotation = frozenset() if family.position_rows is not None else ROTATION_KEYS
    local = (family.rope.local_key,) if family.rope.local_key else ()
    return SHARED_KEYS | rotation | {*sizes(family), *family.usual_values, *local}


def honoured(values: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    """Family's keys and values. A decoder gets its known keys under their usual names, completed with usual values;
    others get everything. Raises ModelLoadError with the key for an unsupported one, and for null where a value is
    needed."""
    fields, is_decoder = Fields(values, where), bool(family.usual_values)
    for key, neutral in ({**REFUSED, **family.refused} if is_decoder else family.refused).items():
        if key in values and values[key] not in neutral:
            raise fields.error(f"{key} {shown(values[key])} is not supported")
    if not is_decoder:
        return dict(values)
    known = known_keys(family)
    found = {**family.usual_values, **{key: value for key, value in values.items() if key in known}}
    for name, key in family.renamed.items():
        if name in values:
            found[key] = values[name]
    for key, usual in family.usual_values.items():
        if found[key] is None and usual is not None and key not in family.nullable:
            raise fields.error(f"{key} must not be null")
    return found
