from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from quire.config.families.family import Family, GGUFNames

Shapes = dict[str, tuple[int, ...]]

SHARED = "ffn_gate_shexp"
"""Tensor in each layer with experts, in architectures with a shared expert."""
GATE_EXPERTS, UP_EXPERTS, JOINED_EXPERTS = "ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps"
_WITHOUT_SUFFIX = ("attn_sinks", "exp_probs_b", "ssm_a", "ssm_dt")
"""Tensors without a suffix in Hugging Face's checkpoints."""
_BARE = "ssm_a"
"""Tensor without a suffix in GGUF files too."""
_LAYER_TENSOR = re.compile(rf"blk\.(0|[1-9][0-9]{{0,5}})\.(?:(?P<bare>{_BARE})|(?P<name>[a-z_0-9]+)\.(weight|bias))")
_TOP_TENSOR = re.compile(r"([a-z_]+)\.(weight|bias)")
_INNER_NORMS = ("attn_q_norm", "attn_k_norm", "attn_q_a_norm", "attn_kv_a_norm", "ssm_norm")
"""Norms over another size than the hidden size."""


def hf_name(name: str, names: GGUFNames) -> str | None:
    """Hugging Face's name of a tensor; None if the architecture does not have it."""
    layer = _LAYER_TENSOR.fullmatch(name)
    if layer is not None:
        own = layer["bare"] or layer["name"]
        if own in names.layer:
            place = f"{names.layers}.{layer[1]}.{names.layer[own]}"
            return place if own in _WITHOUT_SUFFIX else f"{place}.{layer[4]}"
    top = _TOP_TENSOR.fullmatch(name)
    if top is not None and top[1] in names.top:
        return f"{names.top[top[1]]}.{top[2]}"
    return None


def layer_of(name: str) -> int | None:
    layer = re.match(r"blk\.([0-9]{1,6})\.", name)
    return None if layer is None else int(layer[1])


def expected_shapes(family: Family, names: GGUFNames, config: Mapping[str, Any]) -> Shapes:
    """Shape of every tensor in elements, by name in the file. config: result of `read_gguf`."""
    hidden = config["hidden_size"]
    embedding = (config["vocab_size"], hidden)
    expected: Shapes = {"token_embd.weight": embedding, "output_norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        expected["output.weight"] = embedding
    norms: Shapes = {
        f"{name}.weight": (hidden,) for name in names.layer if name.endswith("_norm") and name not in _INNER_NORMS
    }
    attention = norms | (_latent(config) if family.has_latents else _heads(family, config))
    state = norms | _state(names, config) if family.state_layer else {}
    dense = _dense(family, config)
    experts = _experts(family, names, config) if names.has_experts else dense
    kinds = config.get("layer_types")
    for index in range(config["num_hidden_layers"]):
        mixer = state if kinds is not None and kinds[index] == "linear_attention" else attention
        mlp = dense if index < config.get("first_k_dense_replace", 0) else experts
        expected |= {f"blk.{index}.{name}": shape for name, shape in (mixer | mlp).items()}
    return expected


def encoder_shapes(config: Mapping[str, Any]) -> Shapes:
    """Tensor shapes of a BERT file, by name: learned positions, token types, and biases everywhere."""
    hidden, inner, types = config["hidden_size"], config["intermediate_size"], config["type_vocab_size"]
    expected: Shapes = {
        "token_embd.weight": (config["vocab_size"], hidden),
        "position_embd.weight": (config["max_position_embeddings"], hidden),
        "token_types.weight": (types, hidden),
        **_layer_norm("token_embd_norm", hidden),
    }
    layer = {
        **{
            key: shape
            for name in ("q", "k", "v", "output")
            for key, shape in _linear(f"attn_{name}", hidden, hidden, bias=True).items()
        },
        **_layer_norm("attn_output_norm", hidden),
        **_linear("ffn_up", inner, hidden, bias=True),
        **_linear("ffn_down", hidden, inner, bias=True),
        **_layer_norm("layer_output_norm", hidden),
    }
    for index in range(config["num_hidden_layers"]):
        expected |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
    return expected


def _layer_norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def with_joined_experts(expected: Shapes, present: Collection[str]) -> Shapes:
    """Shapes for a file in which some layers have gate above up in one tensor for each expert. present: names in the
    file."""
    found = dict(expected)
    for name in expected:
        joined = name.replace(GATE_EXPERTS, JOINED_EXPERTS)
        if name.endswith(f"{GATE_EXPERTS}.weight") and joined in present:
            count, width, hidden = found.pop(name)
            del found[name.replace(GATE_EXPERTS, UP_EXPERTS)]
            found[joined] = (count, 2 * width, hidden)
    return found


def _linear(name: str, rows: int, columns: int, *, bias: bool = False) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (rows, columns)}
    return shapes | {f"{name}.bias": (rows,)} if bias else shapes


def _heads(family: Family, config: Mapping[str, Any]) -> Shapes:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    bias = family.query_bias.default or config["attention_bias"]
    has_output_bias = bool(family.output_bias.key) and config["attention_bias"]
    shapes = {
        **_linear("attn_q", 2 * query if family.output_gate else query, hidden, bias=bias),
        **_linear("attn_k", key, hidden, bias=bias),
        **_linear("attn_v", key, hidden, bias=bias),
        **_linear("attn_output", hidden, query, bias=has_output_bias),
    }
    if family.head_norms:
        shapes |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
    if family.has_sinks:
        shapes["attn_sinks.weight"] = (config["num_attention_heads"],)
    return shapes


def _latent(config: Mapping[str, Any]) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, turned, value = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rank, query_rank = config["kv_lora_rank"], config["q_lora_rank"]
    shapes = {
        **_linear("attn_kv_a_mqa", rank + turned, hidden),
        "attn_kv_a_norm.weight": (rank,),
        **_linear("attn_output", hidden, heads * value),
    }
    if config["expansion_apart"]:
        shapes |= {"attn_k_b.weight": (heads, rank, nope), "attn_v_b.weight": (heads, value, rank)}
    else:
        shapes |= _linear("attn_kv_b", heads * (nope + value), rank)
    if query_rank is None:
        return shapes | _linear("attn_q", heads * (nope + turned), hidden)
    return {
        **shapes,
        **_linear("attn_q_a", query_rank, hidden),
        "attn_q_a_norm.weight": (query_rank,),
        **_linear("attn_q_b", heads * (nope + turned), query_rank),
    }


def _state(names: GGUFNames, config: Mapping[str, Any]) -> Shapes:
    hidden, heads, value_dim = config["hidden_size"], config["linear_num_value_heads"], config["linear_value_head_dim"]
    value = heads * value_dim
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + value
    gates = _linear("ssm_ba", 2 * heads, hidden)
    if "ssm_ba" not in names.layer:
        gates = _linear("ssm_beta", heads, hidden) | _linear("ssm_alpha", heads, hidden)
    return {
        **_linear("attn_qkv", channels, hidden),
        **_linear("attn_gate", value, hidden),
        "ssm_conv1d.weight": (channels, config["linear_conv_kernel_dim"]),
        "ssm_dt.bias": (heads,),
        _BARE: (heads,),
        **gates,
        "ssm_norm.weight": (value_dim,),
        **_linear("ssm_out", hidden, value),
    }


def _dense(family: Family, config: Mapping[str, Any]) -> Shapes:
    hidden, inner, bias = config["hidden_size"], config["intermediate_size"], config["mlp_bias"]
    return {
        **_linear("ffn_gate", inner, hidden, bias=bias),
        **_linear("ffn_up", inner, hidden, bias=bias),
        **_linear("ffn_down", hidden, inner, bias=bias),
    }


def _experts(family: Family, names: GGUFNames, config: Mapping[str, Any]) -> Shapes:
    hidden, count, width = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    shapes = _linear("ffn_gate_inp", count, hidden, bias=family.expert_bias)
    for name, rows, columns in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
        shapes[f"ffn_{name}_exps.weight"] = (count, rows, columns)
        if family.expert_bias:
            shapes[f"ffn_{name}_exps.bias"] = (count, rows)
    if family.corrects_choice:
        shapes["exp_probs_b.bias"] = (count,)
    shared = config.get("shared_expert_intermediate_size") or config.get("n_shared_experts", 0) * width
    if shared:
        shapes |= _linear("ffn_gate_shexp", shared, hidden) | _linear("ffn_up_shexp", shared, hidden)
        shapes |= _linear("ffn_down_shexp", hidden, shared)
    if family.has_shared_gate:
        shapes["ffn_gate_inp_shexp.weight"] = (hidden,)
    return shapes
