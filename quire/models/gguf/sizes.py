"""Memory of a GGUF file's weights packed for the CPU kernels, from the file's header. Matrices with a common input are
packed as one, or, in several block formats, keep the file's bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.config.gguf import ROPE_FACTORS, head_layout
from quire.config.gguf_tensors import GATE_EXPERTS, UP_EXPERTS, layer_of
from quire.config.model import ModelConfig
from quire.config.quantization import QuantizationConfig
from quire.models.gguf.blocks import FORMATS, WHOLE_BLOCKS
from quire.utils.gguf import GGUFFile, TensorEntry

_JOINED = (
    ("attn_q", "attn_k", "attn_v"),
    ("ffn_gate", "ffn_up"),
    (GATE_EXPERTS, UP_EXPERTS),
    ("ffn_gate_shexp", "ffn_up_shexp"),
    ("ssm_beta", "ssm_alpha"),
)
"""Tensors of a layer packed as one matrix."""
_VECTOR_BYTES = 4
_TABLES = ("token_embd", "output")
"""Vocabulary tables; quantising at load leaves them at eight bits."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One matrix of a file as read. kind: "integer", "float8", "mxfp4", or "plain" (floating point). in_blocks: bytes
    in the file if it can be packed unchanged, else None. bits to has_half_scales: layout of integers."""

    kind: str
    elements: int
    in_blocks: int | None = None
    bits: int = 0
    group_size: int = 1
    has_offsets: bool = False
    has_half_scales: bool = False


def packed_weight_bytes(file: GGUFFile, model: ModelConfig) -> int:
    """Bytes of all weights packed in memory for CPU kernels. file: the model's, open or closed."""
    layout = head_layout(file)
    matrices: dict[str, list[_Part]] = {}
    total = 0
    for entry in file.tensors.values():
        if entry.name == ROPE_FACTORS or (layer_of(entry.name) or 0) >= layout.num_layers:
            continue
        if len(entry.shape) == 1 or entry.name.endswith("ssm_conv1d.weight"):
            total += math.prod(entry.shape) * _VECTOR_BYTES
            continue
        is_reordered = layout.names.tiled and entry.name.endswith("ssm_out.weight")
        elements = math.prod(entry.shape)
        if entry.name.endswith("attn_kv_b.weight"):
            # Each head's key rows are transposed, as floating point; its value rows are unchanged.
            keys = _key_elements(model, elements)
            matrices[f"{entry.name} of keys"] = [_Part("plain", keys)]
            elements -= keys
        matrices.setdefault(_matrix_of(entry.name), []).append(_part(model, entry, elements, is_reordered))
    total += sum(_matrix_bytes(model, parts) for parts in matrices.values())
    expansion = model.resolved_shape().expansion_parameters if model.expands_prompts else 0
    return total + expansion * model.dtype_bytes


def _matrix_of(name: str) -> str:
    place, _, own = name.removesuffix(".weight").rpartition(".")
    return f"{place}.{next((group[0] for group in _JOINED if own in group), own)}"


def _key_elements(model: ModelConfig, elements: int) -> int:
    attention = model.shape.attention
    keys = attention.key_dim - attention.rotated_dim
    return elements * keys // (keys + attention.value_dim)


def _part(model: ModelConfig, entry: TensorEntry, elements: int, is_reordered: bool) -> _Part:
    """elements: the entry's in this part. is_reordered: entry's columns are permuted, so blocks are unpacked."""
    kind = entry.type.name
    if entry.type.values == 1:
        return _plain_part(model.quantization, entry, elements)
    in_blocks = elements // entry.type.values * entry.type.num_bytes
    if kind == "MXFP4":
        return _Part("mxfp4", elements, in_blocks, 4, 32)
    stored = FORMATS[kind]
    return _Part(
        "integer",
        elements,
        in_blocks if kind in WHOLE_BLOCKS and not is_reordered else None,
        stored.bits,
        stored.group_size,
        stored.has_offsets,
        stored.has_half_scales,
    )


def _plain_part(quantization: QuantizationConfig | None, entry: TensorEntry, elements: int) -> _Part:
    if quantization is None:
        return _Part("plain", elements)
    columns = entry.shape[-1]
    if entry.name.removesuffix(".weight") in _TABLES:
        return _Part("integer", elements, bits=8, group_size=columns)
    bits, group_size = quantization.bits, quantization.group_size or columns
    if quantization.is_integer:
        return _Part("integer", elements, None, bits, group_size, has_offsets=bits == 4, has_half_scales=bits == 4)
    return _Part(quantization.stored_type, elements, bits=bits, group_size=group_size)


def _matrix_bytes(model: ModelConfig, parts: list[_Part]) -> int:
    elements, kinds = sum(part.elements for part in parts), {part.kind for part in parts}
    blocks = [part.in_blocks for part in parts if part.in_blocks is not None]
    if len(blocks) == len(parts):
        return sum(blocks)
    if "plain" in kinds or len(kinds) > 1:
        return elements * model.dtype_bytes
    bits = max(part.bits for part in parts)
    num_groups = elements // math.gcd(*(part.group_size for part in parts))
    if kinds == {"mxfp4"}:
        return elements * bits // 8 + num_groups
    number = 2 if all(part.has_half_scales for part in parts) else 4
    per_group = number * (1 + any(part.has_offsets for part in parts))
    if bits == 8 and kinds == {"integer"} and model.quantization is not None and model.quantization.rounds_activations:
        per_group += 4  # each group's sum of values
    return elements * bits // 8 + num_groups * per_group
