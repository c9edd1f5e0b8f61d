from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.config.families import ARCHITECTURES, FAMILIES
from quire.config.families.family import EXPERT, Family, GGUFNames
from quire.config.gguf import ROPE_FACTORS
from quire.config.gguf_tensors import Shapes, expected_shapes, hf_name
from quire.config.hf_json import Fields, shown
from quire.config.model import ModelConfig
from quire.config.model_shape import Experts
from quire.config.rope import FULL, SLIDING, RopeConfig, read_rope
from quire.errors import ModelLoadError
from quire.utils.gguf_writer import Value

EXPORTED = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text")
_AS_LLAMA = "mistral"
"""Model type written to GGUF files as architecture `llama`."""
_COMPARED = ("rms_norm_eps", "hidden_act", "hidden_activation", "attn_logit_softcapping", "final_logit_softcapping",
             "query_pre_attn_scalar", "sliding_window", "norm_topk_prob")  # fmt: skip
"""Keys of config.json that the reader must find again in a written file."""
_SCALED = ("linear", "yarn")
_LARGE_LAYERS = 80


@dataclass(frozen=True)
class Description:
    """Header of a GGUF file to be written. metadata: keys without the tokenizer's. shapes: by name, in the file's
    order. places: Hugging Face name of a tensor -> place. rope_factors: divisors of the rotation's frequencies, a
    tensor. is_large: the size that mixes treat differently."""

    names: GGUFNames
    metadata: dict[str, Value]
    shapes: Shapes
    places: Mapping[str, TensorPlace]
    rope_factors: tuple[float, ...]
    is_large: bool


@dataclass(frozen=True)
class TensorPlace:
    """Target of a checkpoint's tensor in a GGUF file. name: tensor in the file. expert: index in a stack; None: the
    whole tensor."""

    name: str
    expert: int | None = None


def describe(config: ModelConfig, title: str) -> Description:
    """Header of a model's file for `quire quantize`. title: its readable name. Raises ModelLoadError for families that
    cannot be exported, and for settings that files cannot express."""
    family = _family(config)
    names = family.gguf
    assert names is not None, "exported families have names in files"
    hf = config.hf
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": int(hf["intermediate_size"]),
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "tie_word_embeddings": config.shape.is_tied,
        "attention_bias": bool(hf.get("attention_bias", False)),
        "mlp_bias": bool(hf.get("mlp_bias", False)),
    }
    experts = config.shape.layers[0].experts
    if experts is not None:
        sizes |= {"num_experts": experts.num_experts, "moe_intermediate_size": experts.intermediate}
        sizes["shared_expert_intermediate_size"] = experts.shared_intermediate
    shapes = expected_shapes(family, names, sizes)
    rope = _rope(config, family)
    factors = _llama3_factors(rope) if rope.rope_type == "llama3" else ()
    own = _sizes(config, sizes) | _rotation(config, family, rope) | _windows(config, names)
    own |= {cap: float(hf[cap]) for cap in names.caps if hf.get(cap) is not None} | _experts(experts)
    metadata: dict[str, Value] = {
        "general.architecture": names.architecture,
        "general.type": "model",
        "general.name": title,
        "general.quantization_version": 2,
        **{f"{names.architecture}.{key}": value for key, value in own.items()},
    }
    places = _places(names, shapes)
    if factors:
        shapes = {ROPE_FACTORS: (len(factors),), **shapes}
    is_large = config.num_layers == _LARGE_LAYERS and config.num_heads != config.num_kv_heads
    return Description(names, metadata, shapes, places, factors, is_large and names.architecture in ("llama", "qwen2"))


def _places(names: GGUFNames, shapes: Shapes) -> dict[str, TensorPlace]:
    places: dict[str, TensorPlace] = {}
    for name, shape in shapes.items():
        source = hf_name(name, names)
        assert source is not None, "the names of an architecture's tensors are known"
        if EXPERT in source:
            places |= {source.replace(EXPERT, str(index)): TensorPlace(name, index) for index in range(shape[0])}
        else:
            places[source] = TensorPlace(name)
    return places


def _experts(experts: Experts | None) -> dict[str, Value]:
    if experts is None:
        return {}
    keys: dict[str, Value] = {
        "expert_count": experts.num_experts,
        "expert_used_count": experts.num_active,
        "expert_feed_forward_length": experts.intermediate,
    }
    shared = experts.shared_intermediate
    return keys | ({"expert_shared_feed_forward_length": shared} if shared else {})


def check_read_back(config: ModelConfig, found: ModelConfig) -> None:
    """Raise ModelLoadError where the file's configuration differs from the model's. `quire quantize` calls it on a
    finished file."""
    ours, theirs = (_comparable(each) for each in (config, found))
    for what, value in ours.items():
        other = theirs[what]
        is_same = value == other
        if isinstance(value, float) and isinstance(other, int | float):
            is_same = math.isclose(value, other, rel_tol=1e-6)
        if not is_same:
            raise ModelLoadError(
                f"{config.path}: a GGUF file cannot say what its config.json says: {what} is {shown(value)}, and would "
                f"be read as {shown(other)}"
            )


def _family(config: ModelConfig) -> Family:
    family = ARCHITECTURES.get(config.architecture)
    if family is None or family.model_type not in EXPORTED or config.impl != "quire" or config.pooling is not None:
        known = ", ".join(FAMILIES[name].architectures[0] for name in EXPORTED)
        raise ModelLoadError(f"{config.path}: no GGUF file is made of {config.architecture} (known: {known})")
    if config.quantization is not None:
        raise ModelLoadError(f"{config.path} is quantised already ({config.quantization.method}): give the original")
    return replace(family, gguf=FAMILIES["llama"].gguf) if family.model_type == _AS_LLAMA else family


def _sizes(config: ModelConfig, sizes: Mapping[str, Any]) -> dict[str, Value]:
    return {
        "vocab_size": sizes["vocab_size"],
        "context_length": int(config.hf["max_position_embeddings"]),
        "embedding_length": sizes["hidden_size"],
        "block_count": sizes["num_hidden_layers"],
        "feed_forward_length": sizes["intermediate_size"],
        "attention.head_count": sizes["num_attention_heads"],
        "attention.head_count_kv": sizes["num_key_value_heads"],
        "attention.key_length": sizes["head_dim"],
        "attention.value_length": sizes["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config.hf["rms_norm_eps"]),
    }


def _rope(config: ModelConfig, family: Family, kind: str = FULL) -> RopeConfig:
    return read_rope(Fields(config.hf, str(config.path)), config.head_dim, family.rope, kind)


def _rotation(config: ModelConfig, family: Family, rope: RopeConfig) -> dict[str, Value]:
    if rope.rope_type not in ("default", "llama3", *_SCALED):
        raise ModelLoadError(f"{config.path}: a GGUF file cannot say the RoPE settings {rope.rope_type!r}")
    keys: dict[str, Value] = {"rope.dimension_count": rope.rotary_dim, "rope.freq_base": rope.theta}
    if rope.rope_type in _SCALED:
        keys |= {"rope.scaling.type": rope.rope_type, "rope.scaling.factor": float(rope.factor or 1.0)}
    if rope.rope_type == "yarn":
        keys["rope.scaling.original_context_length"] = rope.original_max_position_embeddings
        keys["rope.scaling.yarn_beta_fast"], keys["rope.scaling.yarn_beta_slow"] = rope.beta_fast, rope.beta_slow
    if family.rope.local_theta is not None:
        keys["rope.freq_base_swa"] = _rope(config, family, SLIDING).theta
    return keys


def _llama3_factors(rope: RopeConfig) -> tuple[float, ...]:
    factors, trained = [], rope.original_max_position_embeddings
    for place in range(0, rope.rotary_dim, 2):
        turns = trained / (2 * math.pi * rope.theta ** (place / rope.rotary_dim))
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = min(max(kept, 0.0), 1.0)
        factors.append(1 / ((1 - kept) / (rope.factor or 1.0) + kept))
    return tuple(factors)


def _windows(config: ModelConfig, names: GGUFNames) -> dict[str, Value]:
    windows = config.sliding_windows
    sizes = {window for window in windows if window is not None}
    if not sizes:
        return {}
    if not names.windowed:
        raise ModelLoadError(f"{config.path}: files of {names.architecture} have no sliding window")
    keys: dict[str, Value] = {"attention.sliding_window": sizes.pop()}
    if None in windows and names.architecture == "gemma3":
        keys["attention.sliding_window_pattern"] = windows.index(None) + 1
    return keys


def _comparable(config: ModelConfig) -> dict[str, Any]:
    shape, family = config.shape, ARCHITECTURES[config.architecture]
    found: dict[str, Any] = {
        "the vocabulary": shape.vocab,
        "the hidden size": shape.hidden,
        "tie_word_embeddings": shape.is_tied,
        "max_position_embeddings": config.hf["max_position_embeddings"],
    }
    for number, layer in enumerate(shape.layers):
        found[f"layer {number}"] = layer
    found |= {key: config.hf[key] for key in _COMPARED if config.hf.get(key) is not None and key in _kept(config)}
    kinds: Iterable[str] = (FULL, SLIDING) if family.rope.local_theta is not None else (FULL,)
    for kind in kinds:
        rope = _rope(config, family, kind)
        if rope.rope_type not in ("llama3", "longrope"):  # which become a tensor of divisors
            found |= {f"{name} of the rotation ({kind})": value for name, value in vars(rope).items()}
    return found


def _kept(config: ModelConfig) -> Iterable[str]:
    return [key for key in _COMPARED if key != "sliding_window" or any(config.sliding_windows)]
