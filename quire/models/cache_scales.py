"""Checkpoint scales for an 8-bit KV cache: one for a layer's keys, one for its values. compressed-tensors
(`kv_cache_scheme`), ModelOpt (`kv_cache_quant_algo`) and vLLM name them differently; stored = value / scale. Only e4m3
caches use them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch

from quire.config.families import ARCHITECTURES
from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.kernels.arguments import CacheScale
from quire.logging import get_logger
from quire.models.weight_files import Tensors, WeightFiles
from quire.quantization.file_tensor import FileTensor

logger = get_logger(__name__)

_SCALE = re.compile(
    r"(?:^|\.)(?P<layer>\d+)\.(?:\w+\.)*?"
    r"(?:(?:self_attn|attn|attention)\.(?:(?:attn|qkv_proj)\.)?(?P<part>k|v|q|kv)_scale"
    r"|(?P<projection>[kv])_proj\.(?:[kv]|output)_scale)$"
)
EIGHT_BITS = 8


def load_cache_scales(
    tensors: Tensors, scales: Mapping[int, CacheScale], config: ModelConfig, where: object
) -> Tensors:
    """Copy the cache's scales to `scales` (by layer, for an e4m3 cache only) and yield the other tensors. Scales of
    queries are ignored; the log counts other unused ones. where: the checkpoint, for the log. Raises ModelLoadError
    naming an invalid scale."""
    why_not = _why_left_out(config)
    family = ARCHITECTURES.get(config.architecture)
    drafts = "" if family is None else family.draft_prefix
    num_left_out = 0
    for name, tensor in tensors:
        found = _SCALE.search(name)
        if found is None:
            yield name, tensor
            continue
        layer = int(found["layer"]) + (config.num_layers if drafts and name.startswith(drafts) else 0)
        part, scale = found["part"] or found["projection"], scales.get(layer)
        if part == "q":
            continue
        if why_not is not None or scale is None:
            num_left_out += 1
            continue
        number = _number(name, tensor)
        if "k" in part:
            scale.key = number
        if "v" in part:
            scale.value = number
    if num_left_out:
        reason = why_not or "layers without keys and values of each head have none"
        logger.info("%s: %d scales of an 8-bit KV cache are left out: %s", where, num_left_out, reason)


def stored_cache_scales(files: WeightFiles) -> dict[str, list[float]]:
    """All KV-cache scales in a checkpoint, by name, for the cache's identity on disk. Raises ModelLoadError for
    unreadable files."""
    found = ((name, tensor) for name, tensor in files.stream(lambda done, total: None) if _SCALE.search(name))
    return {name: _read(tensor).flatten().tolist() for name, tensor in found}


def _why_left_out(config: ModelConfig) -> str | None:
    if config.kv_cache_dtype != "fp8":
        return f"keys and values are kept in {config.kv_cache_dtype}"
    quantization = config.hf.get("quantization_config")
    if isinstance(quantization, Mapping):
        scheme, method = quantization.get("kv_cache_scheme"), quantization.get("kv_cache_quant_algo")
        if isinstance(scheme, Mapping) and scheme.get("num_bits", EIGHT_BITS) != EIGHT_BITS:
            return f"they are for numbers of {scheme['num_bits']} bits"
        if isinstance(method, str) and method.lower() not in ("fp8", "int8"):
            return f"they are for numbers of {method}"
    return None


def _number(name: str, tensor: torch.Tensor | FileTensor) -> float:
    if not tensor.is_floating_point() or math.prod(tensor.shape) != 1:
        raise ModelLoadError(
            f"tensor {name!r} is {list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}: an fp8 cache has "
            "one scale for all keys of a layer and one for its values; choose kv_cache_dtype='auto'"
        )
    number = float(_read(tensor))
    if not (number > 0 and math.isfinite(number)):
        raise ModelLoadError(f"tensor {name!r} is {number}, which is no scale")
    return number


def _read(tensor: torch.Tensor | FileTensor) -> torch.Tensor:
    return tensor.read() if isinstance(tensor, FileTensor) else tensor
