"""Checks of config.json's claimed model size against files and memory, before anything is allocated."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from quire.config.model import ModelConfig
from quire.errors import InsufficientMemoryError
from quire.layers.adapters import Adapters
from quire.layers.context import LayerContext
from quire.layers.operations import TorchOperations
from quire.models.interface import LoadableModel
from quire.models.registry import build_model
from quire.models.weight_files import WeightFiles
from quire.parallel.single import SINGLE_RANK
from quire.quantization.unquantized import UnquantizedLinear
from quire.utils.sizes import format_bytes

PLAIN_BITS = 16
"""Minimum bits per weight in an unquantised file."""
SHARING = 2
"""Maximum tensors that share memory in a `torch.save` file, such as an embedding and its tied head."""


def excess(config: ModelConfig, model: LoadableModel, files: WeightFiles) -> str | None:
    """Message if files are too small for config.json's weights, else None. model: from `outline`. Raises ModelLoadError
    for a missing file."""
    quantization = config.quantization
    is_quantized = quantization is not None and quantization.checkpoint_format is not None
    bits = quantization.bits if quantization is not None and is_quantized else PLAIN_BITS
    sizes = files.sizes()
    room = sum(size * (1 if path.suffix == ".safetensors" else SHARING) for path, size in sizes.items())
    num_weights = sum(math.prod(slot.shape) for slot in model.slots.values())
    if num_weights * bits <= 8 * room:
        return None
    return (
        f"config.json describes a model of {num_weights} weights, and the files hold "
        f"{format_bytes(sum(sizes.values()))}: too few for that many of {bits} bits"
    )


def check_dummy(config: ModelConfig, available: int) -> None:
    """Raise InsufficientMemoryError, before loading, if random weights for `config` take more than `available`
    bytes."""
    bits = 8 * config.dtype_bytes if config.quantization is None else config.quantization.bits
    shapes = [slot.shape for slot in outline(config).slots.values()]
    num_weights, largest = sum(map(math.prod, shapes)), max(map(math.prod, shapes))
    needed = num_weights * bits // 8 + 4 * largest  # the largest tensor is also drawn in float32
    if needed > available:
        raise InsufficientMemoryError(
            f"load_format='dummy': {num_weights} weights of {bits} bits take {format_bytes(needed)} while they are "
            f"made, and {format_bytes(available)} are available"
        )


def outline(config: ModelConfig, adapters: Adapters | None = None) -> LoadableModel:
    """Model on the meta device; its slots describe a checkpoint."""
    return build_model(config, replace(outline_context(config), adapters=adapters))


def outline_context(config: ModelConfig) -> LayerContext:
    dtype = torch.float32
    plain = UnquantizedLinear(dtype)
    return LayerContext(
        dtype=dtype,
        device=torch.device("meta"),
        cache_dtype=config.kv_cache_dtype,
        group=SINGLE_RANK,
        operations=TorchOperations(),
        linear=plain,
        vocabulary=plain,
        positions=plain,
    )
