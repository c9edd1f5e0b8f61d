"""What one layer keeps in the KV cache: a frozen value per kind of layer (hybrid models mix kinds)."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.config.model import CACHE_DTYPE_BYTES, CACHE_SCALE_BYTES, ModelConfig


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


def layer_specs(config: ModelConfig, num_ranks: int = 1) -> list[LayerSpec]:
    """What each layer of an attention-only model keeps on one of `num_ranks` ranks, by layer index: its share of the
    key and value heads, or one of them where there are fewer heads than ranks.

    Models and `quire plan` share it.
    """
    cache = config.kv_cache_dtype
    shape = (
        max(1, config.num_kv_heads // num_ranks),
        config.head_dim,
        CACHE_DTYPE_BYTES[cache],
        CACHE_SCALE_BYTES.get(cache, 0),
    )
    return [
        FullAttentionSpec(*shape) if window is None else SlidingWindowSpec(*shape, window=window)
        for window in config.sliding_windows
    ]
