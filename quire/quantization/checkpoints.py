"""Quantised checkpoints: from stored tensors to matrices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from quire.config.quantization import QuantizationConfig
from quire.quantization.compressed_tensors import compressed_tensors_format
from quire.quantization.float_checkpoints import float8_format, mxfp4_format, nvfp4_format
from quire.quantization.gptq import awq_format, gptq_format
from quire.quantization.integer_weight import WeightTensor
from quire.quantization.parts import assemble

FORMATS = {
    "gptq": gptq_format,
    "gptq_v2": gptq_format,
    "awq": awq_format,
    "pack-quantized": compressed_tensors_format,
    "int-quantized": compressed_tensors_format,
    "fp8": float8_format,
    "nvfp4": nvfp4_format,
    "nvfp4-pack-quantized": nvfp4_format,
    "mxfp4": mxfp4_format,
    "mxfp4-pack-quantized": mxfp4_format,
}


def quantized_weights(
    tensors: Iterable[tuple[str, torch.Tensor]], config: QuantizationConfig | None
) -> Iterator[tuple[str, WeightTensor]]:
    """Checkpoint's tensors with each quantised matrix assembled under one name; other tensors pass through. Raises
    ModelLoadError like `assemble`."""
    if config is None or config.checkpoint_format is None:
        return iter(tensors)
    return assemble(tensors, FORMATS[config.checkpoint_format](config))
