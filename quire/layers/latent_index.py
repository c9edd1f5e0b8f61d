"""Indexer of sparse latent attention (DeepSeek-V3.2): small heads that score all keys for each token, with one key per
token beside the latent."""

from __future__ import annotations

from dataclasses import dataclass

from quire.attention.interface import AttentionStep
from quire.kernels.arguments import IndexShape
from quire.kernels.rotation import RotationTable
from quire.kernels.value import Value
from quire.layers.context import LayerContext, WeightSlots, prefixed
from quire.layers.linear import LocalRows
from quire.layers.moe import unquantized
from quire.layers.norm import LayerNorm

KEY_NORM_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class IndexHeads:
    """Heads of an indexer. num_heads, dim: the queries'; keys have one head. rope_dim: leading rotated elements, pairs
    half of it apart. top: keys that a token reads."""

    num_heads: int
    dim: int
    rope_dim: int
    top: int


class LatentIndexer:
    """Chooses the keys of tokens that see more than `heads.top`. query_size: size of compressed queries. latent_width:
    size of the vectors beside the keys. Raises ConfigError for an unsupported indexer."""

    def __init__(
        self, hidden_size: int, query_size: int, layer: int, latent_width: int, heads: IndexHeads, context: LayerContext
    ) -> None:
        scale = heads.dim**-0.5 * heads.num_heads**-0.5
        self.shape = IndexShape(layer, heads.num_heads, heads.dim, heads.rope_dim, heads.top, latent_width, scale)
        context.operations.check_index(self.shape)
        self._query = LocalRows(query_size, heads.num_heads * heads.dim, context)
        self._key = LocalRows(hidden_size, heads.dim, context)
        self._key_norm = LayerNorm(heads.dim, KEY_NORM_EPSILON, context)
        self._weights = LocalRows(hidden_size, heads.num_heads, unquantized(context))

    def __call__(self, x: Value, queries: Value, rotation: RotationTable | None, step: AttentionStep) -> Value:
        """Store the tokens' keys, and return the chosen keys for `AttentionStep.attend_latent`. x: [T, hidden_size];
        queries: [T, query_size], compressed."""
        inputs = self._query(queries), self._key_norm(self._key(x)), self._weights(x)
        return step.select_keys(self.shape, inputs, rotation)

    def slots(self) -> WeightSlots:
        return {
            **self._query.slots("wq_b"),
            **self._key.slots("wk"),
            **prefixed("k_norm", self._key_norm.slots()),
            **self._weights.slots("weights_proj"),
        }
