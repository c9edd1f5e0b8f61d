"""What a GGUF file says about its model, in the words of a Hugging Face config.json.

The metadata's keys begin with the architecture's name ("llama.block_count"); tensors have short names of their own
("blk.0.attn_q.weight"). A model is as large as its file's tensors: sizes that the metadata claims are compared with
them here, before anything of that size is made.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config.families import GGUF
from quire.config.families.family import GGUFNames
from quire.config.hf_json import Fields, shown
from quire.config.model import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS
from quire.config.rope import FULL, SLIDING
from quire.utils.gguf import GGUFFile

EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""End of text, of turn and of message, under "tokenizer.ggml."."""
NO_TOKEN = 2**32 - 1
"""What some files write where there is no such token."""
ROPE_FACTORS = "rope_freqs.weight"

_SHARED = "ffn_gate_shexp"
"""A tensor that architectures with a shared expert have in each layer."""
_SINKS = "attn_sinks"
"""The only tensor whose name has a suffix in files and none elsewhere."""
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")
_TOP_TENSOR = re.compile(r"([a-z_]+)\.(weight|bias)")

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "expert_count": (0,),
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
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
"""Keys that change what a model computes in a way that is not supported, with the values that change nothing."""


@dataclass(frozen=True)
class HeadLayout:
    """num_heads, num_kv_heads: of queries and of keys. names: of the file's architecture."""

    num_heads: int
    num_kv_heads: int
    names: GGUFNames


def hf_name(name: str, names: GGUFNames) -> str | None:
    """Hugging Face's name of a tensor, or None for one that models of its architecture do not have."""
    layer = _LAYER_TENSOR.fullmatch(name)
    if layer is not None and layer[2] in names.layer:
        place = f"model.layers.{layer[1]}.{names.layer[layer[2]]}"
        return place if layer[2] == _SINKS else f"{place}.{layer[3]}"
    top = _TOP_TENSOR.fullmatch(name)
    if top is not None and top[1] in names.top:
        return f"{names.top[top[1]]}.{top[2]}"
    return None


def read_gguf_config(path: Path) -> dict[str, Any]:
    """The config.json that the model of a GGUF file would have. Raises ModelLoadError for a model that is not
    supported, and for metadata that is missing, absurd or contradicts the tensors."""
    with GGUFFile(path) as file:
        keys = _Keys(file)
        family = keys.family
        config = _sizes(file, keys)
        layout = head_layout(file)
        config |= {
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
        if layout.names.has_experts:
            config |= {
                "num_experts": keys.integer("expert_count"),
                "num_experts_per_tok": keys.integer("expert_used_count"),
                "moe_intermediate_size": keys.integer("expert_feed_forward_length", config["intermediate_size"]),
            }
        if _SHARED in layout.names.layer:
            config["shared_expert_intermediate_size"] = keys.integer("expert_shared_feed_forward_length")
        if layout.names.largest:
            is_largest = config["num_hidden_layers"] == layout.names.largest
            config["query_pre_attn_scalar"] = (
                config["hidden_size"] / config["num_attention_heads"] if is_largest else config["head_dim"]
            )
        window = keys.optional_integer("attention.sliding_window", minimum=0)
        if window:
            if not layout.names.windowed:
                raise keys.error("attention.sliding_window is not supported for this architecture")
            config["sliding_window"] = window
            if layout.names.windowed not in family.architectures:
                config |= {"architectures": [layout.names.windowed], "attention_bias": False, "mlp_bias": False}
            pattern = keys.optional_integer("attention.sliding_window_pattern")
            config |= {} if pattern is None else {"sliding_window_pattern": pattern}
        config |= layout.names.settings
        _check_tensors(file, keys, config)
        rope = _rope(file, keys, config)
        if family.rope.local_theta is not None:
            local = {"rope_theta": keys.number("rope.freq_base_swa", family.rope.local_theta)}
            rope = {FULL: rope, SLIDING: {"rope_type": "default", **local}}
        config["rope_parameters"] = {**rope, **layout.names.rope}
        return config


def head_layout(file: GGUFFile) -> HeadLayout:
    """How the rows of query and key matrices are shared out and ordered."""
    keys = _Keys(file)
    num_heads = keys.integer("attention.head_count")
    return HeadLayout(
        num_heads=num_heads,
        num_kv_heads=keys.optional_integer("attention.head_count_kv") or num_heads,
        names=keys.names,
    )


class _Keys:
    """Typed access to the keys of the file's architecture, named without it."""

    def __init__(self, file: GGUFFile) -> None:
        everything = Fields(file.metadata, str(file.path))
        architecture = everything.choice("general.architecture", sorted({name for name, _ in GGUF}))
        prefix = f"{architecture}."
        own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
        fields = Fields(own, f"{file.path} ({architecture})")
        self.error, self.integer, self.optional_integer = fields.error, fields.integer, fields.optional_integer
        self.number, self.optional_number, self.choice = fields.number, fields.optional_number, fields.choice
        has_experts = bool(fields.optional_integer("expert_count", minimum=0))
        found = GGUF.get((architecture, has_experts)) or GGUF.get((architecture, not has_experts))
        assert found is not None, "an architecture has a family with experts or one without"
        assert found.gguf is not None, "GGUF holds families with GGUF names"
        self.family, self.names = found, found.gguf
        for key, values in _NEUTRAL.items():
            is_read = key in self.names.caps or (key == "expert_count" and self.names.has_experts)
            if key in own and own[key] not in values and not is_read:
                raise fields.error(f"{key} {shown(own[key])} is not supported")


def _sizes(file: GGUFFile, keys: _Keys) -> dict[str, Any]:
    hidden_size, num_heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.optional_integer("attention.key_length", maximum=MAX_HEAD_DIM)
    if head_dim is None:
        head_dim = hidden_size // num_heads
    if head_dim < 2:
        raise keys.error(f"heads cannot have {head_dim} elements")
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise keys.error("value heads of another size than key heads are not supported")
    if keys.integer("rope.dimension_count", head_dim) != head_dim:
        raise keys.error("rotating a part of each head is not supported")
    context = keys.integer("context_length", maximum=MAX_POSITIONS)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise file.error("the tensor 'token_embd.weight' is missing")
    return {
        "architectures": [keys.family.architectures[0]],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count", maximum=MAX_LAYERS),
        "head_dim": head_dim,
        "max_position_embeddings": context,
    }


def _eos_token_ids(file: GGUFFile) -> list[int]:
    fields = Fields(file.metadata, str(file.path))
    found = (fields.optional_integer(f"tokenizer.ggml.{key}", minimum=0, maximum=NO_TOKEN) for key in EOS_KEYS)
    return sorted({token_id for token_id in found if token_id not in (None, NO_TOKEN)})


def _check_tensors(file: GGUFFile, keys: _Keys, config: Mapping[str, Any]) -> None:
    """Every tensor of the model is there in the shape that the metadata says, and no other."""
    num_layers = config["num_hidden_layers"]
    if num_layers > len(file.tensors):
        raise file.error(f"block_count is {num_layers}, and there are {len(file.tensors)} tensors")
    expected = _expected_shapes(keys, config)
    for name, shape in expected.items():
        entry = file.tensors.get(name)
        if entry is None:
            raise file.error(f"the tensor {name!r} is missing")
        if entry.shape != shape:
            raise file.error(f"tensor {name!r} has shape {list(entry.shape)}, the metadata asks for {list(shape)}")
    for name in file.tensors:
        if name not in expected and name != ROPE_FACTORS:
            raise file.error(f"tensor {name!r} does not belong to a model of its architecture")


def _expected_shapes(keys: _Keys, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    family, names = keys.family, keys.names.layer
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    qkv_bias = family.query_bias.default or config["attention_bias"]
    # Name: rows, columns, and whether there is a bias.
    matrices = {
        "attn_q": (query, hidden, qkv_bias),
        "attn_k": (key, hidden, qkv_bias),
        "attn_v": (key, hidden, qkv_bias),
        "attn_output": (hidden, query, bool(family.output_bias.key) and config["attention_bias"]),
        "ffn_gate": (inner, hidden, config["mlp_bias"]),
        "ffn_up": (inner, hidden, config["mlp_bias"]),
        "ffn_down": (hidden, inner, config["mlp_bias"]),
    }
    head_norms = {f"{name}.weight": (head_dim,) for name in ("attn_q_norm", "attn_k_norm")}
    layer: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in names if name.endswith("_norm")}
    layer = {name: shape for name, shape in layer.items() if name not in head_norms}
    if family.head_norms:
        layer |= head_norms
    if family.has_sinks:
        layer["attn_sinks.weight"] = (config["num_attention_heads"],)
    if keys.names.has_experts:
        experts, width = config["num_experts"], config["moe_intermediate_size"]
        matrices = {name: sizes for name, sizes in matrices.items() if name in names}
        matrices["ffn_gate_inp"] = (experts, hidden, family.expert_bias)
        for name, rows, columns in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
            layer[f"ffn_{name}_exps.weight"] = (experts, rows, columns)
            if family.expert_bias:
                layer[f"ffn_{name}_exps.bias"] = (experts, rows)
    if _SHARED in names:
        inner = config["shared_expert_intermediate_size"]
        layer["ffn_gate_inp_shexp.weight"] = (hidden,)
        matrices |= {f"ffn_{name}_shexp": (inner, hidden, False) for name in ("gate", "up")}
        matrices["ffn_down_shexp"] = (hidden, inner, False)
    for name, (rows, columns, bias) in matrices.items():
        layer[f"{name}.weight"] = (rows, columns)
        if bias:
            layer[f"{name}.bias"] = (rows,)
    embedding = (config["vocab_size"], hidden)
    expected: dict[str, tuple[int, ...]] = {"token_embd.weight": embedding, "output_norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        expected["output.weight"] = embedding
    for index in range(config["num_hidden_layers"]):
        expected |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
    return expected


def _rope(file: GGUFFile, keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """The RoPE settings in Transformers' words."""
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
    if factors is not None:
        # LLaMA 3.1's scaling, worked out: a divisor for each frequency, whatever the length. That is what longrope
        # does when its long and short factors are the same and cos and sin are not scaled.
        if factors.type.name != "F32" or factors.shape != (config["head_dim"] // 2,):
            raise file.error(f"{ROPE_FACTORS} must be {config['head_dim'] // 2} numbers of type F32")
        divisors = list(struct.unpack(f"<{factors.shape[0]}f", file.data(factors)))
        rope |= {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0}
        rope |= {"short_factor": divisors, "long_factor": divisors}
    return rope
