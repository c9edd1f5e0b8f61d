"""Type of each tensor in a GGUF mix, by llama.cpp's rules. A mix has a type for most matrices, more bits for some value
projections, MLP matrices and the head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.config.gguf_tensors import layer_of

BLOCK_VALUES = 256
"""Weights in a block of K-quants and IQ4_XS."""
SMALL_BLOCK = 32
_FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
"""Type -> replacement if its blocks do not divide the rows."""
_SHARED_HEADS = 4
"""Queries per key from which the value projection is relatively small."""

_FEW_EXPERTS = 8
_BESIDE_FEW = {"attn_v": "Q8_0", "attn_k": "Q8_0", "attn_output": "Q5_K"}
"""Types in models of _FEW_EXPERTS experts."""


@dataclass(frozen=True)
class Mix:
    """Mixture of block types that `quire quantize --to` names. usual: type of most matrices. number: value of
    "general.file_type"."""

    usual: str
    number: int


MIXES: Mapping[str, Mix] = {
    "q4_k_m": Mix("Q4_K", 15),
    "q5_k_m": Mix("Q5_K", 17),
    "q6_k": Mix("Q6_K", 18),
    "q8_0": Mix("Q8_0", 7),
    "iq4_xs": Mix("IQ4_XS", 30),
    "bf16": Mix("BF16", 32),
    "f16": Mix("F16", 1),
    "f32": Mix("F32", 0),
}
"""Mixes by name. The last three keep floating point."""


@dataclass(frozen=True)
class MixedModel:
    """Properties of a model that decide tensors' types in a mix. heads_per_key: queries that share a key. is_large:
    LLaMA or Qwen 2 of 80 layers. has_importance: the importance of the columns' errors is known."""

    num_layers: int
    heads_per_key: int
    is_tied: bool
    is_large: bool
    has_importance: bool
    num_experts: int = 0


def tensor_type(name: str, shape: tuple[int, ...], mix: str, model: MixedModel) -> str:
    """Block type that `quire quantize` gives a tensor. shape: outermost dimension first. Vectors and routers stay
    float32."""
    if len(shape) < 2 or name.endswith("ffn_gate_inp.weight"):
        return "F32"
    usual = MIXES[mix].usual
    if usual in ("F32", "F16", "BF16"):
        return usual
    columns = shape[-1]
    wanted = _wanted(name, columns, mix, model)
    if columns % _block_values(wanted):
        wanted = _FALLBACK.get(wanted, wanted)
    return wanted if columns % _block_values(wanted) == 0 else "F16"


def _block_values(kind: str) -> int:
    return BLOCK_VALUES if kind in _FALLBACK else SMALL_BLOCK


def _wanted(name: str, columns: int, mix: str, model: MixedModel) -> str:
    usual, layer = MIXES[mix].usual, layer_of(name)
    own = name.removesuffix(".weight").rpartition(".")[2]
    if own == "output" or (own == "token_embd" and model.is_tied):
        if columns % _block_values(usual):
            return "Q8_0"
        return usual if usual == "Q8_0" else "Q6_K"
    if layer is None:
        return usual
    if model.num_experts == _FEW_EXPERTS and usual != "Q8_0" and own in _BESIDE_FEW:
        kept = own == "attn_output" and usual not in ("Q4_K", "IQ4_XS")
        return usual if kept else _BESIDE_FEW[own]
    has_more = mix in ("q4_k_m", "q5_k_m") and _counts_more(layer, model.num_layers)
    if own == "attn_v":
        if has_more:
            return "Q6_K"
        if mix == "iq4_xs" and model.heads_per_key >= _SHARED_HEADS:
            return "Q5_K"
        return "Q5_K" if model.is_large and usual == "Q4_K" else usual
    if own.startswith("ffn_down"):
        if has_more:
            return "Q6_K"
        if mix == "iq4_xs" and layer < model.num_layers // 8 and not model.has_importance:
            return "Q5_K"
    return usual


def _counts_more(layer: int, num_layers: int) -> bool:
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
