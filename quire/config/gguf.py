"""GGUF file's metadata as a Hugging Face config.json. Metadata keys begin with the architecture's name
("llama.block_count"); tensors have short names ("blk.0.attn_q.weight")."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quire.config.families import GGUF
from quire.config.families.family import Family, GGUFNames
from quire.config.gguf_tensors import encoder_shapes, expected_shapes, layer_of, with_joined_experts
from quire.config.hf_json import Fields, shown
from quire.config.model import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS
from quire.config.pooling import Method
from quire.config.rope import FULL, SLIDING
from quire.utils.gguf import GGUFFile

EOS_KEYS = (
    *("eos_token_id", "eot_token_id", "eom_token_id"),
    *("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id"),
)
"""Keys under "tokenizer.ggml." of end tokens: of text, turn and message, and between two files."""
END_NAMES = frozenset(
    {
        *("</s>", "<eos>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]"),
        *("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
        *("<end_of_turn>", "<end_of_utterance>", "<turn|>", "<|tool_response>"),
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    }
)
"""Tokens that always end a text, as in llama.cpp: most files name one of a model's several."""
NO_TOKEN = 2**32 - 1
"""Token id that some files write for "none"."""
ROPE_FACTORS = "rope_freqs.weight"

_YARN_LOG = "rope.scaling.yarn_log_multiplier"
_SOFTMAX = 1
"""Default of the metadata key expert_gating_func: softmax."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_group_count": (0, 1),
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "attention.temperature_scale": (0.0,),
    _YARN_LOG: (0.0,),
}
"""Unsupported keys that change what a model computes, with the values that change nothing."""
_POOLING: Mapping[int, Method | None] = {0: None, 1: "mean", 2: "cls", 3: "last"}
"""GGUF's pooling_type -> pooling method; 0: tokens are not pooled."""
_LATENT_KEYS = ("expert_weights_scale", "expert_group_count", _YARN_LOG)
"""Keys of _NEUTRAL that latent attention supports: all such models are like DeepSeek's."""


@dataclass(frozen=True)
class HeadLayout:
    """Heads of a GGUF file's layers, whose rows loading reorders. num_heads, num_kv_heads: query and key heads. names:
    GGUF names of the architecture. num_layers: layers without those that predict further tokens. state: heads of layers
    with a state, where the file orders them differently."""

    num_heads: int
    num_kv_heads: int
    names: GGUFNames
    num_layers: int
    state: StateHeads | None = None


@dataclass(frozen=True)
class StateHeads:
    """Heads of a delta net, where value heads share key heads. value_dim: elements of a value head. key_rows: rows of
    queries and keys, before those of values."""

    num_keys: int
    num_values: int
    value_dim: int
    key_rows: int


class Described(NamedTuple):
    """Answer of `read_gguf`. config: config.json, read or made from GGUF metadata. pooling: method that a GGUF file
    names."""

    config: dict[str, Any]
    pooling: Method | None = None


def read_gguf(path: Path) -> Described:
    """Model of a GGUF file. Raises ModelLoadError for unsupported models and methods of pooling, and for metadata
    that is missing, absurd or contradicts the tensors."""
    with GGUFFile(path) as file:
        keys = _Keys(file)
        return Described(_config(file, keys), _pooling(keys))


def _config(file: GGUFFile, keys: _Keys) -> dict[str, Any]:
    family, layout = keys.family, _layout(keys)
    if family.is_bidirectional:
        return _encoder_config(file, keys, layout)
    config = {
        **_sizes(file, keys, layout),
        "num_attention_heads": layout.num_heads,
        "num_key_value_heads": layout.num_kv_heads,
        "hidden_act": layout.names.activation,
        "hidden_activation": layout.names.activation,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": bool(family.query_bias.key) and "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": bool(family.mlp_bias.key) and "blk.0.ffn_up.bias" in file.tensors,
        "eos_token_id": _eos_token_ids(file),
    }
    config |= {key: keys.number(key) for key in layout.names.caps if keys.optional_number(key) is not None}
    config |= _expert_keys(keys, config) if layout.names.has_experts else {}
    config |= _latent_keys(file, keys) if family.has_latents else {}
    config |= _state_keys(file, keys, config) if family.state_layer else {}
    if layout.names.largest:
        is_largest = config["num_hidden_layers"] == layout.names.largest
        config["query_pre_attn_scalar"] = (
            config["hidden_size"] / config["num_attention_heads"] if is_largest else config["head_dim"]
        )
    config |= _window_keys(keys)
    config |= layout.names.settings
    _check_tensors(file, keys, config)
    rope = _rope(file, keys, config)
    if family.rope.local_theta is not None:
        local = {"rope_theta": keys.number("rope.freq_base_swa", family.rope.local_theta)}
        rope = {FULL: rope, SLIDING: {"rope_type": "default", **local}}
    config["rope_parameters"] = {**rope, **layout.names.rope}
    return _in_words_of(family, config)


def _pooling(keys: _Keys) -> Method | None:
    kind = keys.optional_integer("pooling_type", minimum=0)
    if kind in (None, NO_TOKEN, *_POOLING):
        return _POOLING.get(kind or 0)
    known = ", ".join(f"{number} ({name})" for number, name in _POOLING.items() if name)
    raise keys.error(f"pooling_type {kind} is not supported (known: {known})")


def _encoder_config(file: GGUFFile, keys: _Keys, layout: HeadLayout) -> dict[str, Any]:
    types = file.tensors.get("token_types.weight")
    if types is None:
        raise file.error("the tensor 'token_types.weight' is missing")
    config = {
        **_sizes(file, keys, layout),
        "num_attention_heads": layout.num_heads,
        "hidden_act": layout.names.activation,
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "type_vocab_size": types.shape[0],
    }
    _check_tensors(file, keys, config)
    return config


def _in_words_of(family: Family, config: dict[str, Any]) -> dict[str, Any]:
    usual = family.usual_values
    if "num_experts" in config:
        count = config.pop("num_experts")
        config[next(key for key in ("n_routed_experts", "num_local_experts", "num_experts") if key in usual)] = count
        if "moe_intermediate_size" not in usual:
            config["intermediate_size"] = config.pop("moe_intermediate_size")
    return config


def head_layout(file: GGUFFile) -> HeadLayout:
    return _layout(_Keys(file))


class _Keys:
    """Typed access to the keys of the file's architecture, without its prefix."""

    def __init__(self, file: GGUFFile) -> None:
        everything = Fields(file.metadata, str(file.path))
        architecture = everything.choice("general.architecture", sorted({name for name, *_ in GGUF}))
        prefix = f"{architecture}."
        own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
        fields = Fields(own, f"{file.path} ({architecture})")
        self.error, self.integer, self.optional_integer = fields.error, fields.integer, fields.optional_integer
        self.number, self.optional_number, self.choice = fields.number, fields.optional_number, fields.choice
        self.boolean, self._prefix = fields.boolean, prefix
        has_experts = bool(fields.optional_integer("expert_count", minimum=0))
        gating = fields.integer("expert_gating_func", _SOFTMAX, minimum=0)
        kinds = ((has_experts, gating), (has_experts, 0), (not has_experts, gating), (not has_experts, 0))
        found = next((GGUF[architecture, *kind] for kind in kinds if (architecture, *kind) in GGUF), None)
        if found is None:
            raise fields.error(f"expert_gating_func {gating} is not supported")
        assert found.gguf is not None, "GGUF holds families with GGUF names"
        self.family, self.names = found, found.gguf
        for key, values in _NEUTRAL.items():
            is_read = key in self.names.caps or (key == "expert_count" and self.names.has_experts)
            is_read = is_read or (key in _LATENT_KEYS and found.has_latents)
            if key == "attention.causal" and found.is_bidirectional:
                values = (False,)
            if key in own and own[key] not in values and not is_read:
                raise fields.error(f"{key} {shown(own[key])} is not supported")

    def named(self, key: str) -> str:
        return self._prefix + key


def _layout(keys: _Keys) -> HeadLayout:
    num_heads, num_layers = keys.integer("attention.head_count"), keys.integer("block_count", maximum=MAX_LAYERS)
    num_extra = keys.optional_integer("nextn_predict_layers", minimum=0) or 0
    if num_extra >= num_layers:
        raise keys.error(f"nextn_predict_layers is {num_extra}, and there are {num_layers} layers in all")
    is_apart = keys.family.has_latents  # a file says 1 for one latent, which all heads read
    return HeadLayout(
        num_heads=num_heads,
        num_kv_heads=num_heads if is_apart else keys.optional_integer("attention.head_count_kv") or num_heads,
        names=keys.names,
        num_layers=num_layers - num_extra,
        state=_state_heads(keys) if keys.names.tiled else None,
    )


def _state_heads(keys: _Keys) -> StateHeads:
    num_keys, num_values = keys.integer("ssm.group_count"), keys.integer("ssm.time_step_rank")
    inner, key_dim = keys.integer("ssm.inner_size"), keys.integer("ssm.state_size")
    if inner % num_values or num_values % num_keys:
        raise keys.error(f"{num_values} value heads of {num_keys} key heads cannot share {inner} elements")
    return StateHeads(num_keys, num_values, inner // num_values, 2 * num_keys * key_dim)


def _sizes(file: GGUFFile, keys: _Keys, layout: HeadLayout) -> dict[str, Any]:
    hidden_size = keys.integer("embedding_length")
    context = keys.integer("context_length", maximum=MAX_POSITIONS)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise file.error("the tensor 'token_embd.weight' is missing")
    width = keys.optional_integer("feed_forward_length")
    if width is None:  # of models whose layers all have experts
        width = keys.integer("expert_feed_forward_length" if layout.names.has_experts else "feed_forward_length")
    return {
        "architectures": [keys.family.architectures[0]],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": width,
        "num_hidden_layers": layout.num_layers,
        "head_dim": _head_dim(keys, hidden_size, layout.num_heads),
        "max_position_embeddings": context,
    }


def _head_dim(keys: _Keys, hidden_size: int, num_heads: int) -> int:
    if keys.family.has_latents:
        return keys.integer("rope.dimension_count", maximum=MAX_HEAD_DIM)
    head_dim = keys.optional_integer("attention.key_length", maximum=MAX_HEAD_DIM)
    if head_dim is None:
        head_dim = hidden_size // num_heads
    if head_dim < 2:
        raise keys.error(f"heads cannot have {head_dim} elements")
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise keys.error("value heads of another size than key heads are not supported")
    if keys.family.rope.share == 1.0 and keys.integer("rope.dimension_count", head_dim) != head_dim:
        raise keys.error("rotating a part of each head is not supported")
    return head_dim


def _expert_keys(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", config["intermediate_size"]),
    }
    if keys.family.has_shared_gate:
        found["shared_expert_intermediate_size"] = keys.integer("expert_shared_feed_forward_length")
    return found


def _latent_keys(file: GGUFFile, keys: _Keys) -> dict[str, Any]:
    turned = keys.integer("rope.dimension_count", maximum=MAX_HEAD_DIM)
    is_apart = "blk.0.attn_kv_b.weight" not in file.tensors
    suffix = "_mla" if keys.optional_integer("attention.key_length_mla") is not None else ""
    key = keys.integer(f"attention.key_length{suffix}", maximum=MAX_HEAD_DIM)
    if key <= turned:
        raise keys.error(f"heads of {key} elements cannot have {turned} that are rotated and others besides")
    num_groups = keys.optional_integer("expert_group_count", minimum=0) or 1
    has_groups = num_groups > 1
    found: dict[str, Any] = {
        "q_lora_rank": keys.optional_integer("attention.q_lora_rank"),
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": key - turned,
        "v_head_dim": keys.integer(f"attention.value_length{suffix}", maximum=MAX_HEAD_DIM),
        "expansion_apart": is_apart,
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0, minimum=0),
        "n_shared_experts": keys.integer("expert_shared_count", 0, minimum=0),
        "routed_scaling_factor": keys.optional_number("expert_weights_scale") or 1.0,
        "norm_topk_prob": keys.boolean("expert_weights_norm", False),
        "n_group": num_groups,
        "topk_group": keys.integer("expert_group_used_count") if has_groups else 1,
    }
    return found | ({"topk_method": "group_limited_greedy"} if has_groups and not keys.family.corrects_choice else {})


def _state_keys(file: GGUFFile, keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    heads, num_layers = _state_heads(keys), config["num_hidden_layers"]
    listed = file.numbers(keys.named("attention.recurrent_layers"))
    if listed is not None and len(listed) < num_layers:
        raise keys.error(f"attention.recurrent_layers must say of each of the {num_layers} layers what it is")
    every = keys.integer("full_attention_interval", 4)
    is_state = listed or [(layer + 1) % every != 0 for layer in range(num_layers)]
    return {
        "layer_types": ["linear_attention" if state else "full_attention" for state in is_state[:num_layers]],
        "linear_num_key_heads": heads.num_keys,
        "linear_num_value_heads": heads.num_values,
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_value_head_dim": heads.value_dim,
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
    }


def _window_keys(keys: _Keys) -> dict[str, Any]:
    window = keys.optional_integer("attention.sliding_window", minimum=0)
    if not window:
        return {}
    if not keys.names.windowed:
        raise keys.error("attention.sliding_window is not supported for this architecture")
    config: dict[str, Any] = {"sliding_window": window}
    if keys.names.windowed not in keys.family.architectures:
        config |= {"architectures": [keys.names.windowed], "attention_bias": False, "mlp_bias": False}
    pattern = keys.optional_integer("attention.sliding_window_pattern")
    return config if pattern is None else config | {"sliding_window_pattern": pattern}


def _eos_token_ids(file: GGUFFile) -> list[int]:
    fields = Fields(file.metadata, str(file.path))
    stated = (fields.optional_integer(f"tokenizer.ggml.{key}", minimum=0, maximum=NO_TOKEN) for key in EOS_KEYS)
    known = end_tokens(file.places("tokenizer.ggml.tokens", END_NAMES))
    return sorted({token_id for token_id in (*stated, *known.values()) if token_id not in (None, NO_TOKEN)})


def end_tokens(named: Mapping[str, int]) -> dict[str, int]:
    """Name -> id of the vocabulary's tokens that end a text. named: those in END_NAMES."""
    found = dict(named)
    calls = found.keys() & {"<|call|>", "<|calls|>"}
    if calls and found.keys() & {"<|return|>", "<|flush|>"}:
        found.pop("<|end|>", None)  # in the format of these models it ends a message, behind which others follow
    if "<|tool_response>" in found:
        found.pop("</s>", None)  # such a vocabulary has it as a mark of web pages
    return found


def _check_tensors(file: GGUFFile, keys: _Keys, config: Mapping[str, Any]) -> None:
    """Check that the file has the metadata's tensors and shapes, and no others except layers after the last. Raises
    ModelLoadError."""
    num_layers, num_blocks = config["num_hidden_layers"], keys.integer("block_count")
    if num_layers > len(file.tensors):
        raise file.error(f"block_count is {num_layers}, and there are {len(file.tensors)} tensors")
    if keys.family.is_bidirectional:
        expected = encoder_shapes(config)
    else:
        expected = with_joined_experts(expected_shapes(keys.family, keys.names, config), file.tensors.keys())
    for name, shape in expected.items():
        entry = file.tensors.get(name)
        if entry is None:
            raise file.error(f"the tensor {name!r} is missing")
        if entry.shape != shape:
            raise file.error(f"tensor {name!r} has shape {list(entry.shape)}, the metadata asks for {list(shape)}")
    for name in file.tensors:
        layer = layer_of(name)
        is_further = layer is not None and num_layers <= layer < num_blocks
        if name not in expected and name != ROPE_FACTORS and not is_further:
            raise file.error(f"tensor {name!r} does not belong to a model of its architecture")


def _rope(file: GGUFFile, keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base", 10_000.0)}
    kind = keys.choice("rope.scaling.type", ("none", "linear", "yarn"), "none")
    factors = file.tensors.get(ROPE_FACTORS)
    if kind != "none":
        if factors is not None:
            raise keys.error(f"rope.scaling.type {kind!r} together with the tensor {ROPE_FACTORS!r} is not supported")
        rope |= {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = keys.integer("rope.scaling.original_context_length")
        rope["beta_fast"] = keys.number("rope.scaling.yarn_beta_fast", 32.0)
        rope["beta_slow"] = keys.number("rope.scaling.yarn_beta_slow", 1.0)
        log = keys.optional_number(_YARN_LOG)
        if log is not None:  # a tenth of it, by which llama.cpp multiplies logarithms
            rope |= {"mscale": 10 * log, "mscale_all_dim": 10 * log}
    sections = file.numbers(keys.named("rope.dimension_sections")) if keys.family.rope.mrope_section else None
    if sections is not None:
        rope["mrope_section"] = [int(size) for size in sections[:3]]
    if keys.family.rope.share != 1.0:
        turned = keys.integer("rope.dimension_count", maximum=config["head_dim"])
        rope["partial_rotary_factor"] = turned / config["head_dim"]
    if factors is not None:
        # LLaMA 3.1's scaling, worked out: a divisor for each frequency, whatever the length. That is what longrope
        # does when its long and short factors are the same and cos and sin are not scaled.
        if factors.type.name != "F32" or factors.shape != (config["head_dim"] // 2,):
            raise file.error(f"{ROPE_FACTORS} must be {config['head_dim'] // 2} numbers of type F32")
        divisors = list(struct.unpack(f"<{factors.shape[0]}f", file.data(factors)))
        rope |= {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0}
        rope |= {"short_factor": divisors, "long_factor": divisors}
    return rope
