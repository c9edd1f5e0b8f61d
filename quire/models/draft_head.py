"""The head for drafts (multi-token prediction) of Qwen3-Next and Qwen 3.5: layers behind a model's last one that guess
the token after the next.

It takes a token's hidden state, as the model's final norm gives it, and the embedding of the token that follows. Its
layers keep keys and values in layers of the KV cache behind the model's own. The engine makes no drafts yet: it loads
the head, and allocates no cache for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.config.model import ModelConfig
from quire.kernels.value import Value
from quire.kv_cache.spec import LayerSpec
from quire.layers.batch import ForwardBatch
from quire.layers.context import LayerContext, WeightSlot, WeightSlots, prefixed
from quire.layers.embedding import Embedding
from quire.layers.linear import LocalRows
from quire.layers.norm import UnitOffsetRMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.models.decoder import DecoderLayer
from quire.quantization.integer_weight import WeightSource


class DraftHead:
    """layers: their numbers in the KV cache follow those of the model. embedding, rotary: the model's. Tensors as the
    checkpoints of the family have them. The logits of what it returns are the model's projection to the vocabulary."""

    def __init__(
        self,
        config: ModelConfig,
        epsilon: float,
        layers: Sequence[DecoderLayer],
        embedding: Embedding,
        rotary: RotaryEmbedding,
        context: LayerContext,
    ) -> None:
        self._size = size = config.hidden_size
        self._layers = layers
        self._embedding = embedding
        self._rotary = rotary
        self._operations = context.operations
        self._token_norm, self._hidden_norm, self._norm = (UnitOffsetRMSNorm(size, epsilon, context) for _ in range(3))
        # The two halves of one matrix, so that no kernel puts vectors side by side.
        self._from_token, self._from_hidden = (LocalRows(size, size, context) for _ in range(2))

    def forward(self, hidden: Value, batch: ForwardBatch, index: int = 0) -> Value:
        """Hidden states [R, size] of the guesses, which are inputs of a further guess too.

        hidden: [T, size], of the model, or of the guess before. batch: token_ids are those that follow the tokens of
        `hidden`; positions those that the layers rotate by and write at. index: which of the layers guesses (a
        checkpoint with one layer uses it for every guess).
        """
        tokens = self._from_token(self._token_norm(self._embedding(batch.token_ids)))
        x = self._operations.add(tokens, self._from_hidden(self._hidden_norm(hidden)))
        return self._norm(self._layers[index](x, self._rotary(batch.rotary_positions), batch, batch.logits_rows))

    def cache_specs(self) -> list[LayerSpec]:
        """What the layers keep, behind the specs of the model's layers."""
        return [layer.cache_spec() for layer in self._layers]

    def slots(self) -> WeightSlots:
        size = self._size
        slots = {
            "fc.weight": WeightSlot((size, 2 * size), self._load_halves, 2 * self._from_token.nbytes),
            **prefixed("pre_fc_norm_embedding", self._token_norm.slots()),
            **prefixed("pre_fc_norm_hidden", self._hidden_norm.slots()),
            **prefixed("norm", self._norm.slots()),
        }
        for index, layer in enumerate(self._layers):
            slots |= prefixed(f"layers.{index}", layer.slots())
        return slots

    def _load_halves(self, tensor: WeightSource) -> None:
        for half, matrix in enumerate((self._from_token, self._from_hidden)):
            matrix.load(tensor.narrow(1, half * self._size, self._size))
