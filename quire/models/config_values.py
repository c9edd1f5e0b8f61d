"""Layer parameters that many families of decoders read from the configuration in the same way."""

from __future__ import annotations

from quire.config.families import ARCHITECTURES
from quire.config.hf_config import model_fields
from quire.config.model import ModelConfig
from quire.config.rope import RopeConfig, read_rope
from quire.kernels.activation import ACTIVATIONS
from quire.kernels.arguments import LayerAttention


def layer_attention(config: ModelConfig, layer: int, scale: float | None = None) -> LayerAttention:
    """Attention parameters of one layer; `scale` defaults to 1 / sqrt(head_dim)."""
    return LayerAttention(
        layer=layer,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5 if scale is None else scale,
        window=config.sliding_windows[layer],
        is_chunked=config.shape.layers[layer].attention.kind == "chunked",
    )


def read_activation(config: ModelConfig) -> str:
    return model_fields(config).choice("hidden_act", list(ACTIVATIONS), "silu")


def usual_rope(config: ModelConfig) -> RopeConfig:
    """Rotation of all layers, for families that rotate every layer alike."""
    return read_rope(model_fields(config), config.head_dim, ARCHITECTURES[config.architecture].rope)
