"""Rotary position embeddings with every scaling of Transformers.

Dynamic NTK and longrope use `max_model_len`'s frequencies, so chunking and caching change nothing; up to the trained
length they are Transformers'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from quire.config.rope import RopeConfig
from quire.errors import ModelLoadError
from quire.kernels.arguments import RotaryFrequencies
from quire.kernels.rotation import RotationTable
from quire.kernels.value import Indices
from quire.layers.context import LayerContext


class RotaryEmbedding:
    """Rotations of a step's positions, once a pass for all layers that rotate alike. max_model_len: fixes the
    frequencies."""

    def __init__(self, config: RopeConfig, max_model_len: int, context: LayerContext) -> None:
        frequencies, magnitude = rope_frequencies(config, max_model_len)
        axes = rope_axes(config).to(context.device) if config.mrope_section else None
        self._frequencies = RotaryFrequencies(frequencies.to(context.device), magnitude, context.dtype, axes)
        self._operations = context.operations

    def __call__(self, positions: Indices, grid: Sequence[Indices] = ()) -> RotationTable:
        """Rotation for an AttentionStep. positions: [T] int64. grid: rows and columns, [T] int64 each (empty: equal to
        positions)."""
        return self._operations.rotation(self._frequencies, positions, grid)


def rope_axes(config: RopeConfig) -> torch.Tensor:
    """[rotary_dim / 2] int32: 0, 1 or 2 for each element that rotates by time, row or column
    (`RopeConfig.mrope_section`)."""
    if not config.mrope_interleaved:
        return torch.arange(3, dtype=torch.int32).repeat_interleave(torch.tensor(config.mrope_section))
    axes = torch.zeros(config.rotary_dim // 2, dtype=torch.int32)
    for axis in (1, 2):
        axes[axis : 3 * config.mrope_section[axis] : 3] = axis
    return axes


def rope_frequencies(config: RopeConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies, [rotary_dim / 2] float32, and the factor of cos and sin, for up to `max_model_len` tokens.
    Raises ModelLoadError for invalid settings."""
    try:
        frequencies, magnitude = _SCALINGS[config.rope_type](config, max_model_len)
    except ArithmeticError as error:
        raise ModelLoadError(
            f"the RoPE settings (rope_type {config.rope_type!r}) give no frequencies: {error}"
        ) from None
    if not bool(torch.isfinite(frequencies).all()) or not math.isfinite(magnitude):
        raise ModelLoadError(f"the RoPE settings (rope_type {config.rope_type!r}) give frequencies that are not finite")
    return frequencies, magnitude


def _plain(theta: float, rotary_dim: int) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, rotary_dim, 2).float() / rotary_dim))


def _default(config: RopeConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    return _plain(config.theta, config.rotary_dim), 1.0


def _linear(config: RopeConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    return _plain(config.theta, config.rotary_dim) / _factor(config), 1.0


def _dynamic(config: RopeConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    factor, dim = _factor(config), config.rotary_dim
    length = max(max_model_len, config.max_position_embeddings)
    stretch = factor * length / config.max_position_embeddings - (factor - 1)
    return _plain(config.theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _llama3(config: RopeConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Frequencies of Llama 3, and the factor 1."""
    frequencies = _plain(config.theta, config.rotary_dim)
    wavelengths = 2 * math.pi / frequencies
    trained, low, high = config.original_max_position_embeddings, config.low_freq_factor, config.high_freq_factor
    kept = ((trained / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / _factor(config) + kept * frequencies, 1.0


def _yarn(config: RopeConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Frequencies and factor of YaRN."""
    factor, dim = _factor(config), config.rotary_dim

    def dimension_with(turns: float) -> float:
        trained = config.original_max_position_embeddings
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension_with(config.beta_fast), dimension_with(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(dim // 2).float() - low) / (high - low)).clamp(0.0, 1.0)
    frequencies = _plain(config.theta, dim)
    frequencies = frequencies / factor * stretched + frequencies * (1 - stretched)
    return frequencies, _yarn_magnitude(config, factor)


def _yarn_magnitude(config: RopeConfig, factor: float) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return yarn_factor(factor, config.mscale) / yarn_factor(factor, config.mscale_all_dim)
    return yarn_factor(factor, 1.0)


def yarn_factor(factor: float, weight: float) -> float:
    """YaRN's factor of queries and keys for a context `factor` times the trained one. weight: model's (`mscale`,
    `mscale_all_dim`)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(config: RopeConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    factor, trained = _factor(config), config.original_max_position_embeddings
    stretch = torch.tensor(config.long_factor if max_model_len > trained else config.short_factor)
    exponents = torch.arange(0, config.rotary_dim, 2).float() / config.rotary_dim
    magnitude = config.attention_factor
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return 1.0 / (stretch * config.theta**exponents), magnitude


def _factor(config: RopeConfig) -> float:
    assert config.factor is not None, f"rope_type {config.rope_type} without a factor"
    return config.factor


_SCALINGS: Mapping[str, Callable[[RopeConfig, int], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
