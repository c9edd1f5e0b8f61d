"""KV specs: frozen values that say what one layer keeps in the KV cache.

`kind` names the manager of its blocks. All kinds have `token_bytes` (0 for a state), `dealt_to` (ranks that keep a part
of a sequence's tokens each), `page_bytes`, `page_shape`, and `window` or None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from quire.config.model import CACHE_DTYPE_BYTES, CACHE_SCALE_BYTES, ModelConfig
from quire.config.model_shape import AttentionShape, LayerShape


@dataclass(frozen=True)
class _KeyValueSpec:
    """Key and a value of each token. dtype_bytes: bytes of a stored element. scale_bytes: bytes of the scale of each
    token's key, and of its value, in each head."""

    dealt_to: ClassVar[int] = 1

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype_bytes: int
    scale_bytes: int = 0

    @property
    def token_bytes(self) -> int:
        return self.num_kv_heads * ((self.key_dim + self.value_dim) * self.dtype_bytes + 2 * self.scale_bytes)

    def page_bytes(self, block_size: int) -> int:
        return block_size // self.dealt_to * self.token_bytes

    def page_shape(self, block_size: int) -> tuple[int, ...]:
        """[2, block_size, heads, dim], or [block_size, heads, key_dim + value_dim] if these differ. Shape of one
        layer's part of a block."""
        if self.key_dim == self.value_dim:
            return 2, block_size, self.num_kv_heads, self.key_dim
        return block_size, self.num_kv_heads, self.key_dim + self.value_dim


@dataclass(frozen=True)
class AttentionSpec(_KeyValueSpec):
    """Full attention: keys and values of every token. dealt_to: ranks, of which each keeps part of the tokens; a page
    then has fewer tokens than its block."""

    kind: ClassVar[str] = "full"
    window: ClassVar[int | None] = None

    dealt_to: int = field(default=1, kw_only=True)  # type: ignore[misc]


@dataclass(frozen=True)
class SlidingWindowSpec(_KeyValueSpec):
    """Sliding window: the last `window` tokens (the current one included) are read; older blocks are released."""

    kind: ClassVar[str] = "sliding"

    window: int = field(kw_only=True)


@dataclass(frozen=True)
class ChunkedSpec(_KeyValueSpec):
    """Chunks: a token reads its own chunk, from the last multiple of `window` on; earlier blocks are released."""

    kind: ClassVar[str] = "chunked"

    window: int = field(kw_only=True)


@dataclass(frozen=True)
class LatentSpec:
    """Latent attention: one vector per token, which all heads read as key and value. width: elements of the vector.
    index_width: elements of an indexer's key (0: no indexer). top: tokens that the indexer chooses, whose vectors are
    read. dealt_to: see AttentionSpec."""

    kind: ClassVar[str] = "latent"
    window: ClassVar[int | None] = None

    width: int
    dtype_bytes: int
    scale_bytes: int = 0
    index_width: int = 0
    top: int = 0
    dealt_to: int = field(default=1, kw_only=True)

    @property
    def token_bytes(self) -> int:
        return (self.width + self.index_width) * self.dtype_bytes + self.scale_bytes

    def page_bytes(self, block_size: int) -> int:
        return block_size // self.dealt_to * self.token_bytes

    def page_shape(self, block_size: int) -> tuple[int, ...]:
        """[block_size, width + index_width]: shape of one layer's part of a block."""
        return block_size, self.width + self.index_width


@dataclass(frozen=True)
class StateSpec:
    """Recurrent layer's state of fixed size. num_bytes: bytes of a page, with one sequence's state in one layer; only
    the layer knows its content (quire/layers/functional.py)."""

    kind: ClassVar[str] = "state"
    window: ClassVar[int | None] = None
    dealt_to: ClassVar[int] = 1
    token_bytes: ClassVar[int] = 0

    num_bytes: int

    def page_bytes(self, block_size: int) -> int:
        return self.num_bytes

    def page_shape(self, block_size: int) -> tuple[int, ...]:
        """[bytes], because a page holds arrays of several dtypes. One page holds one sequence's state in one layer."""
        return (self.num_bytes,)


LayerSpec: TypeAlias = AttentionSpec | SlidingWindowSpec | ChunkedSpec | LatentSpec | StateSpec


def layer_spec(
    attention: AttentionShape, dtype_bytes: int, scale_bytes: int = 0, num_ranks: int = 1, dealt_to: int = 1
) -> LayerSpec:
    """Spec of a layer on one of `num_ranks` ranks, which share heads while there are enough. dealt_to: ranks that
    keep part of the tokens each."""
    if attention.kind == "state":
        return StateSpec(attention.state_bytes(num_ranks))
    if attention.kind == "latent":
        latents = (attention.latent_dim, dtype_bytes, scale_bytes, attention.index_dim, attention.index_top)
        return LatentSpec(*latents, dealt_to=dealt_to)
    num_kv_heads = max(1, attention.num_kv_heads // num_ranks)
    sizes = (num_kv_heads, attention.key_dim, attention.value_dim, dtype_bytes, scale_bytes)
    if attention.window is None:
        return AttentionSpec(*sizes, dealt_to=dealt_to)
    kept = ChunkedSpec if attention.kind == "chunked" else SlidingWindowSpec
    return kept(*sizes, window=attention.window)


def layer_specs(config: ModelConfig, num_ranks: int = 1, dealt_to: int = 1) -> list[LayerSpec]:
    """Specs of all layers on one of `num_ranks` ranks, by layer index. dealt_to: see `layer_spec`."""
    return _specs(config, config.shape.layers, num_ranks, dealt_to)


def head_specs(config: ModelConfig) -> list[LayerSpec]:
    """KV-cache specs of a model's draft head (only its first layer makes drafts), for `quire plan`."""
    return _specs(config, config.shape.draft_layers[:1], 1)


def _specs(config: ModelConfig, layers: Sequence[LayerShape], num_ranks: int, dealt_to: int = 1) -> list[LayerSpec]:
    size, scale = CACHE_DTYPE_BYTES[config.kv_cache_dtype], CACHE_SCALE_BYTES.get(config.kv_cache_dtype, 0)
    shapes = [layer.attention for layer in layers if layer.attention.kind != "none"]
    return [layer_spec(shape, size, scale, num_ranks, dealt_to) for shape in shapes]
