"""What one layer keeps in the KV cache: a frozen value per kind of layer (hybrid models mix kinds)."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.config.model import CACHE_DTYPE_BYTES, CACHE_SCALE_BYTES, ModelConfig
from quire.config.model_shape import AttentionShape
from quire.errors import UserError


@dataclass(frozen=True)
class LayerSpec:
    """Full attention: keys and values of every token.

    num_kv_heads, head_dim: of this layer; dtype_bytes: bytes of one stored element; scale_bytes: of what is stored
    besides for each token's key and value in each head.
    """

    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    scale_bytes: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value in one layer."""
        return 2 * self.num_kv_heads * (self.head_dim * self.dtype_bytes + self.scale_bytes)

    def page_bytes(self, block_size: int) -> int:
        return block_size * self.token_bytes


@dataclass(frozen=True)
class FullAttentionSpec(LayerSpec):
    """Every earlier token is read."""


@dataclass(frozen=True)
class SlidingWindowSpec(LayerSpec):
    """Only the last `window` tokens (the current one included) are read; older blocks are given back."""

    window: int = field(kw_only=True)


def layer_spec(attention: AttentionShape, dtype_bytes: int, scale_bytes: int = 0, num_ranks: int = 1) -> LayerSpec:
    """What a layer of this shape keeps on one of `num_ranks` ranks; heads are shared out while there are enough. Raises
    UserError for a layer that keeps a state."""
    if attention.kind == "state":
        raise UserError("the KV cache of layers that keep a state cannot be laid out yet", param="model")
    if attention.kind == "latent":  # A spec counts a key and a value of this size.
        return FullAttentionSpec(1, -(-attention.latent_dim // 2), dtype_bytes, scale_bytes)
    sizes = (max(1, attention.num_kv_heads // num_ranks), attention.key_dim, dtype_bytes, scale_bytes)
    if attention.window is None:
        return FullAttentionSpec(*sizes)
    return SlidingWindowSpec(*sizes, window=attention.window)


def layer_specs(config: ModelConfig, num_ranks: int = 1) -> list[LayerSpec]:
    """What each layer keeps on one of `num_ranks` ranks, by layer index. Models and `quire plan` share it."""
    size, scale = CACHE_DTYPE_BYTES[config.kv_cache_dtype], CACHE_SCALE_BYTES.get(config.kv_cache_dtype, 0)
    return [layer_spec(layer.attention, size, scale, num_ranks) for layer in config.shape.layers]
