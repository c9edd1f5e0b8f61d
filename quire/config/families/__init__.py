"""Families of models: a module each, from config.json to a ModelShape, also of those that only `quire plan` and `quire
simulate` know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from quire.config.families.family import Family
from quire.config.families.keys import honoured
from quire.config.hf_json import Fields
from quire.config.model_shape import ModelShape

_MODULES = (
    "bert", "cohere", "deepseek", "gemma", "glm", "gpt2", "gpt_neox", "gpt_oss", "granite", "kimi_linear", "llama",
    "llama4", "minimax", "mistral", "modernbert", "olmo", "opt", "phi3", "qwen", "qwen_next", "seed_oss", "smollm3",
    "starcoder2",
)  # fmt: skip
FAMILIES: Mapping[str, Family] = {
    family.model_type: family for name in _MODULES for family in import_module(f"{__name__}.{name}").FAMILIES
}
ARCHITECTURES: Mapping[str, Family] = {name: each for each in FAMILIES.values() for name in each.architectures}
"""Families by class, which takes precedence over model_type."""
RUNNABLE = tuple(sorted(name for name, family in ARCHITECTURES.items() if family.is_runnable))
GGUF: Mapping[tuple[str, bool, int], Family] = {
    (each.gguf.architecture, each.gguf.has_experts, each.gguf.gating): each
    for each in FAMILIES.values()
    if each.gguf is not None
}
"""Families by (GGUF architecture, True with experts, expert gating; 0: any gating)."""

_ALIASES = {alias: family for family in FAMILIES.values() for alias in (family.model_type, *family.aliases)}
_OTHER = Family(
    "",
    hidden_size=("hidden_size", "n_embd", "d_model"),
    num_layers=("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    num_heads=("num_attention_heads", "n_head", "n_heads"),
    num_kv_heads=("num_key_value_heads", "num_kv_heads"),
    max_positions=("max_position_embeddings", "n_positions", "max_seq_len"),
    intermediate=("intermediate_size_mlp", "ffn_dim", "n_inner", "intermediate_size"),
    embedding_width=("word_embed_proj_dim",),
    head_norms="head",
    head_norms_key="use_qk_norm",
    windows="unless",
    window=("sliding_window", "attention_chunk_size"),
    layer_types=("full_attention", "sliding_attention", "chunked_attention"),
)
"""Reading of unknown types: gated, with norms, and without biases unless config.json has them."""
TEXT_CONFIG = "text_config"
"""Key of the language model's configuration in a multimodal config.json."""
VISION_CONFIG = "vision_config"
_SHARED_KEYS = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config", "eos_token_id")
"""Outer keys that also hold for the language model."""
_RECURRENT_KEYS = (
    "mamba_d_state", "mamba_d_conv", "ssm_state_size", "state_size", "linear_num_value_heads", "linear_attn_config",
    "conv_L_cache", "layers_block_type", "rwkv", "lru_width",
)  # fmt: skip
"""Keys of layers with a state, in unknown families."""


def by_class(values: Mapping[str, Any]) -> Family | None:
    """Family of the first known class in `architectures`; None: none is known."""
    names = values.get("architectures")
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and name in ARCHITECTURES:
            return ARCHITECTURES[name]
    return None


def language_model(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """(the language model's part of a config.json, its key; "" for the whole). Its own class or model_type names the
    family; outer keys in _SHARED_KEYS take precedence."""
    inner = values.get(TEXT_CONFIG)
    key = TEXT_CONFIG if isinstance(inner, Mapping) and by_class(values) is None else ""
    found = values
    if key and isinstance(inner, Mapping):
        family = _family_of(inner) or _family_of(values)
        found = {**inner, **{name: values[name] for name in _SHARED_KEYS if values.get(name) is not None}}
        found["architectures"] = values.get("architectures")
        if family is not None:
            found |= {"model_type": family.model_type, "architectures": list(family.architectures[:1])}
    elif VISION_CONFIG in values and by_class(values) is None:  # older files keep both models' keys in one object
        family = _family_of(values)
        if family is not None:
            named = {"model_type": family.model_type, "architectures": list(family.architectures[:1])}
            found = {name: value for name, value in values.items() if name != VISION_CONFIG} | named
    return found, key


def known_values(values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """config.json's keys and values that its language model's family reads (`keys.honoured`)."""
    family = _family_of(values)
    return values if family is None else honoured(values, family, where)


def with_usual_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Configuration of a model that Transformers computes, completed with usual values."""
    family = _family_of(values)
    return values if family is None else {**family.usual_values, **values}


def _family_of(values: Mapping[str, Any]) -> Family | None:
    return by_class(values) or _ALIASES.get(str(values.get("model_type") or ""))


def read_shape(values: Mapping[str, Any], name: str = "model", where: str | None = None) -> ModelShape:
    """Shape of any config.json, for planning and simulation; for a multimodal model its language model's
    (`text_config`). where: name in errors (None: `name`). Raises ModelLoadError with the key that is missing, wrong or
    not supported."""
    values, key = language_model(values)
    where = ": ".join(filter(None, (where or name, key)))
    return shape_of(known_values(values, where), name, where)


def shape_of(values: Mapping[str, Any], name: str, where: str) -> ModelShape:
    """Shape from a language model's `known_values`. Raises as `read_shape`."""
    fields, family = Fields(values, where), _family_of(values)
    kind = str(fields.values.get("model_type") or "")
    if family is None or not (family.is_runnable or family.state_layer):
        for key in _RECURRENT_KEYS:
            if fields.values.get(key) is not None:
                raise fields.error(f"the shape of models with recurrent layers ({key}) is not known")
    if family is not None:
        return family.read(fields, name)
    return replace(_OTHER.read(fields, name), family=kind, is_known=False)
