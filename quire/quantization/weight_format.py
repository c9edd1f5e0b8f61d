"""Storage formats of weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quire.config.model import ModelConfig
from quire.quantization.quantize import Fit, quantize_rows
from quire.quantization.quantize_floats import quantize_float8, quantize_mxfp4
from quire.quantization.quantized_weight import QuantizedWeight

EIGHT_BITS = 8


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Quantisation at load time. bits: 0 keeps floating point in `dtype`; 8 and 4 quantise in groups of at most
    `group_size` input features (None: a row), to integers, or with small_floats to FP8 and MXFP4. rounded_activations:
    round activations to 8 bits per row and multiply integers. activation_bits: see ModelConfig. Quantised checkpoints
    stay."""

    dtype: str
    bits: int = 0
    group_size: int | None = None
    rounded_activations: bool = False
    small_floats: bool = False
    activation_bits: int = 0

    def quantize(self, tensor: torch.Tensor, fit: Fit | None = None) -> QuantizedWeight:
        """Plain matrix in this format; `bits` is not 0. fit: see `quantize_rows`."""
        if not self.small_floats:
            return quantize_rows(tensor, self.bits, self.group_size, fit=fit)
        return quantize_float8(tensor) if self.bits == EIGHT_BITS else quantize_mxfp4(tensor)


def weight_formats(config: ModelConfig) -> tuple[WeightFormat, WeightFormat, WeightFormat]:
    """Formats of linear layers, of the vocabulary's matrices, and of learned positions.

    Quantising at load leaves the vocabulary at 8 bits.
    """
    quantization = config.quantization
    plain = WeightFormat(config.dtype, activation_bits=config.activation_bits)
    if quantization is None:
        return plain, plain, plain
    rounded = quantization.rounds_activations
    if quantization.checkpoint_format is not None:
        stored = replace(plain, rounded_activations=rounded)
        return stored, stored, plain
    small_floats = not quantization.is_integer
    linear = replace(
        plain,
        bits=quantization.bits,
        group_size=quantization.group_size,
        rounded_activations=rounded,
        small_floats=small_floats,
    )
    vocabulary = replace(plain, bits=8, rounded_activations=rounded)
    return linear, vocabulary, plain
