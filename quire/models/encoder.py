"""Base of all encoders: no KV cache, and an optional head over the pooled vector."""

from __future__ import annotations

from collections.abc import Sequence

from quire.config.model import ModelConfig
from quire.kernels.arguments import LayerAttention
from quire.kernels.value import Value
from quire.kv_cache.spec import LayerSpec
from quire.layers.attention import Attention
from quire.layers.context import LayerContext, WeightSlots
from quire.layers.embedding import TokenEmbedding
from quire.layers.rotary import RotaryEmbedding
from quire.models.checkpoint_names import CheckpointNames
from quire.models.decoder import Decoder, DecoderLayer
from quire.models.head import OutputHead


class EmbedderHead:
    """Placeholder head of a model whose pooled hidden states are the result; never called."""

    def __init__(self, size: int) -> None:
        self.input_size = size

    def __call__(self, hidden: Value) -> Value:
        raise AssertionError("a vector of a text is not projected")

    def slots(self) -> WeightSlots:
        return {}


class UncachedLayer:
    """Base of an encoder's layers, which keep no keys and values."""

    def cache_spec(self) -> LayerSpec:
        raise AssertionError("a layer of an encoder keeps nothing")


class Encoder(Decoder):
    """Model of bidirectional layers over whole sequences, for embeddings and classification."""

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        layers: Sequence[DecoderLayer],
        prefix: str,
        head: OutputHead | None,
        rotaries: Sequence[RotaryEmbedding] = (),
    ) -> None:
        """prefix, rotaries: see Decoder. head: a classifier's; its slots have checkpoint names."""
        head_of_vectors = EmbedderHead(config.hidden_size)
        super().__init__(layers, prefix, head_of_vectors, CheckpointNames.of(config), context, rotaries)
        self._tokens = TokenEmbedding(config.vocab_size, config.hidden_size, context)
        if head is not None:
            self.project_vectors(head)

    def cache_specs(self) -> list[LayerSpec]:
        return []


def encoder_attention(
    config: ModelConfig, context: LayerContext, layer: int, *, bias: bool, window: int | None = None
) -> Attention:
    """Attention in which every head has its own keys and values. bias: True if both projections have one. window: see
    LayerAttention, for encoders."""
    heads, dim = config.num_heads, config.head_dim
    shape = LayerAttention(layer, heads, heads, dim, dim**-0.5, window)
    return Attention(config.hidden_size, shape, qkv_bias=bias, output_bias=bias, context=context)
