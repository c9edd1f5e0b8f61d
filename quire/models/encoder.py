"""What all encoders share: nothing in the cache, and a head that makes logits of what was pooled."""

from __future__ import annotations

from collections.abc import Sequence

from quire.config.model import ModelConfig
from quire.kernels.arguments import LayerAttention
from quire.kernels.value import Value
from quire.kv_cache.spec import LayerSpec
from quire.layers.attention import Attention
from quire.layers.context import LayerContext, WeightSlots
from quire.layers.embedding import Embedding
from quire.layers.rotary import RotaryEmbedding
from quire.models.checkpoint_names import CheckpointNames
from quire.models.decoder import Decoder, DecoderLayer
from quire.models.head import OutputHead


class EmbedderHead:
    """The head of a model whose pooled hidden states are the result."""

    def __init__(self, size: int) -> None:
        self.input_size = size

    def __call__(self, hidden: Value) -> Value:
        raise AssertionError("a vector of a text is not projected")

    def slots(self) -> WeightSlots:
        return {}


class UncachedLayer:
    """Part of every layer of an encoder."""

    def cache_spec(self) -> LayerSpec:
        raise AssertionError("a layer of an encoder keeps nothing")


class Encoder(Decoder):
    """Layers over whole sequences, in both directions."""

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        layers: Sequence[DecoderLayer],
        prefix: str,
        head: OutputHead | None,
        rotaries: Sequence[RotaryEmbedding] = (),
    ) -> None:
        """prefix, rotaries: as for Decoder. head: of a classifier; its slots are named as in a checkpoint."""
        head_of_vectors = EmbedderHead(config.hidden_size)
        super().__init__(layers, prefix, head_of_vectors, CheckpointNames.of(config), context, rotaries)
        self._tokens = Embedding(config.vocab_size, config.hidden_size, context.vocabulary, context)
        if head is not None:
            self.project_vectors(head)

    def cache_specs(self) -> list[LayerSpec]:
        return []


def encoder_attention(
    config: ModelConfig, context: LayerContext, layer: int, *, bias: bool, window: int | None = None
) -> Attention:
    """Attention of a layer whose heads all have keys and values of their own. bias: whether both projections have one.
    window: as LayerAttention has it for encoders."""
    heads, dim = config.num_heads, config.head_dim
    shape = LayerAttention(layer, heads, heads, dim, dim**-0.5, window)
    return Attention(config.hidden_size, shape, qkv_bias=bias, output_bias=bias, context=context)
