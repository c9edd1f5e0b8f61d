"""Parsing of `quantization_config` for 8-bit and 4-bit float weights. Activation scales are not used: activations stay
unquantised."""

from __future__ import annotations

from quire.config.hf_json import Fields, shown
from quire.config.quantization import QuantizationConfig
from quire.config.quantization_fields import inner_object, known_integer, known_text, unsupported

FLOAT_LAYOUTS = ("float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
MX_GROUP, NV_GROUP = 32, 16
FP8_BITS, FP4_BITS = 8, 4
LARGEST_BLOCK = 2**20


def fp8(fields: Fields) -> QuantizationConfig:
    """FP8 weights with DeepSeek's blocks, or with one scale a matrix or row."""
    known_text(fields, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    known_text(fields, "activation_scheme", ("dynamic", "static"), "dynamic")
    if fields.boolean("is_checkpoint_fp8_serialized", True) is False:
        raise unsupported(fields, "is_checkpoint_fp8_serialized false")
    return QuantizationConfig("fp8", None, "fp8", block_size=_block_size(fields, "weight_block_size"))


def modelopt(fields: Fields) -> QuantizationConfig:
    """ModelOpt's settings, from config.json or from "quantization" of hf_quant_config.json."""
    algorithm = known_text(fields, "quant_algo", ("fp8", "nvfp4"))
    if algorithm == "fp8":
        return QuantizationConfig("fp8", None, "fp8")
    size = fields.optional_integer("group_size")
    if size not in (None, NV_GROUP):
        raise unsupported(fields, f"group_size {size} of nvfp4")
    return QuantizationConfig("nvfp4", NV_GROUP, "nvfp4")


def mxfp4(fields: Fields) -> QuantizationConfig:
    """GPT-OSS's MXFP4 expert matrices, one tensor for all experts of a layer."""
    return QuantizationConfig("mxfp4", MX_GROUP, "mxfp4")


def compressed_floats(scheme: Fields, weights: Fields, layout: str) -> QuantizationConfig:
    """Float formats of compressed-tensors. scheme: the one group of `config_groups`. weights: its weight settings.
    layout: checkpoint's format."""
    known_text(weights, "type", ("float",))
    if weights.values.get("dynamic"):
        raise unsupported(weights, "dynamic weights")
    if not weights.boolean("symmetric", True):
        raise unsupported(weights, "asymmetric floats")
    activations = scheme.values.get("input_activations")
    if activations is not None:
        known_text(inner_object(scheme, "input_activations"), "type", ("float",), "float")
    if layout in ("float-quantized", "naive-quantized"):
        known_integer(weights, "num_bits", (FP8_BITS,))
        strategy = known_text(weights, "strategy", ("tensor", "channel", "block"), "tensor")
        blocks = _block_size(weights, "block_structure") if strategy == "block" else None
        if strategy == "block" and blocks is None:
            raise weights.error("strategy 'block' needs block_structure")
        return QuantizationConfig("fp8", None, "fp8", block_size=blocks)
    if layout not in FLOAT_LAYOUTS:
        raise unsupported(weights, f"type 'float' in the format {shown(layout)}")
    known_integer(weights, "num_bits", (FP4_BITS,))
    method, size = ("nvfp4", NV_GROUP) if layout.startswith("nv") else ("mxfp4", MX_GROUP)
    found = weights.optional_integer("group_size")
    if found not in (None, size):
        raise unsupported(weights, f"group_size {found} of {method}")
    return QuantizationConfig(method, size, layout)


def _block_size(fields: Fields, key: str) -> tuple[int, int] | None:
    """(output rows, input features) that share a scale, from a list or a text like 128x128."""
    value = fields.values.get(key)
    if isinstance(value, str):
        value = [int(part) if part.isdecimal() else part for part in value.lower().split("x")]
    if value is None:
        return None
    fits = isinstance(value, list) and all(type(size) is int and 0 < size <= LARGEST_BLOCK for size in value)
    if not fits or len(value) != 2:
        raise fields.error(f"{key} must be two positive numbers, not {shown(fields.values.get(key))}")
    return value[0], value[1]
