from __future__ import annotations

from collections.abc import Sequence

from quire.config.hf_json import Fields, shown

SUPPORTED = (
    "gptq (4 or 8 bits, formats gptq and gptq_v2), awq (4 bits, gemm layout with zero points), compressed-tensors "
    "(pack-quantized integers of 4 or 8 bits by group or channel; int-quantized 8 bits by channel, with or without "
    "dynamic 8-bit activations per token; float-quantized 8 bits; nvfp4- and mxfp4-pack-quantized), fp8 (whole, by row "
    "or by block), modelopt (FP8, NVFP4) and mxfp4 (experts)"
)


def inner_object(fields: Fields, key: str) -> Fields:
    """Object under a key. Raises ModelLoadError for anything but an object."""
    value = fields.values.get(key)
    if not isinstance(value, dict):
        raise fields.error(f"{key} must be a JSON object, not {shown(value)}")
    return Fields(value, f"{fields.where}: {key}")


def group_size(fields: Fields, key: str) -> int | None:
    """Input features that share a scale; None for -1, which means whole rows."""
    return None if fields.values.get(key) == -1 else fields.integer(key)


def known_integer(fields: Fields, key: str, known: Sequence[int]) -> int:
    """Integer under a key. Raises ModelLoadError with the supported kinds for others."""
    value = fields.integer(key)
    if value not in known:
        raise unsupported(fields, f"{key} {value}")
    return value


def known_text(fields: Fields, key: str, known: Sequence[str], default: str | None = None) -> str:
    """Text under a key, in lower case. Raises ModelLoadError with the supported kinds for others."""
    value = fields.text(key, default).lower()
    if value not in known:
        raise unsupported(fields, f"{key} {shown(value)}")
    return value


def unsupported(fields: Fields, what: str) -> Exception:
    return fields.error(f"{what} is not supported; quantised checkpoints may be {SUPPORTED}")
