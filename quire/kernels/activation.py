"""Activation functions by config.json's names. Built from operations whose vectorised and scalar forms agree bit for
bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

Activation = Callable[[torch.Tensor], torch.Tensor]

_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x), computed in float32."""
    wide = x.float()
    return (wide / (torch.exp(-wide) + 1.0)).to(x.dtype)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x * (normal distribution function of x), computed in float32."""
    wide = x.float()
    return (0.5 * wide * (torch.erf(wide * _SQRT_HALF) + 1.0)).to(x.dtype)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Tanh approximation of gelu, computed in float32."""
    wide = x.float()
    inner = (wide * wide * wide * 0.044715 + wide) * _SQRT_2_OVER_PI
    return (0.5 * wide * (torch.tanh(inner) + 1.0)).to(x.dtype)


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(1.702 x), computed in float32."""
    wide = x.float()
    return (wide / (torch.exp(wide * -1.702) + 1.0)).to(x.dtype)


ACTIVATIONS: Mapping[str, Activation] = {
    "silu": silu,
    "swish": silu,
    "relu": torch.relu,
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
}
