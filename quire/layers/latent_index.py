"""The indexer of sparse latent attention (DeepSeek-V3.2): small heads of its own that score all keys for each token.

It keeps one key a token beside the latent. Every rank computes all of it, so that ranks choose the same keys.
"""

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
    """The heads of an indexer. num_heads, dim: the queries'; its keys are one head. rope_dim: number of their first
    elements, which are rotated, pairs half of it apart. top: keys that a token reads."""

    num_heads: int
    dim: int
    rope_dim: int
    top: int


class LatentIndexer:
    """Chooses the keys of each token that sees more than `heads.top`. query_size: elements of compressed queries.
    latent_width: elements of the vectors that keys are kept beside. Raises ConfigError for an indexer that the context
    does not compute."""

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
        """x: [T, hidden_size]; queries: [T, query_size], compressed. Keeps the tokens' keys, and returns what
        `AttentionStep.attend_latent` takes of the keys that are read."""
        inputs = self._query(queries), self._key_norm(self._key(x)), self._weights(x)
        return step.select_keys(self.shape, inputs, rotation)

    def slots(self) -> WeightSlots:
        return {
            **self._query.slots("wq_b"),
            **self._key.slots("wk"),
            **prefixed("k_norm", self._key_norm.slots()),
            **self._weights.slots("weights_proj"),
        }
