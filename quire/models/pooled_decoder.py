"""Decoders that classify: logits of labels from a text's last hidden state."""

from __future__ import annotations

from quire.config.model import ModelConfig
from quire.kernels.value import Value
from quire.layers.context import LayerContext, WeightSlots
from quire.layers.linear import ColumnParallelLinear
from quire.layers.saved_matrices import SavedMatrices
from quire.models.decoder import LlamaLike

SCORE = "score"
"""Checkpoint name of the head."""


class ScoreHead:
    """Classification head: a linear layer `score` without bias."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        assert config.pooling is not None, "a classifier pools"
        self.input_size = config.hidden_size
        labels = len(config.pooling.labels)
        self._score = ColumnParallelLinear(self.input_size, (labels,), bias=False, context=context.replicated())
        self._operations, self._adapters, self._saved = context.operations, context.adapters, None
        if context.adapters is not None and context.adapters.storage.adds_in_torch:
            self._saved = SavedMatrices(context.adapters, (labels, self.input_size))
            context.adapters.saved[f"{SCORE}.weight"] = self._saved

    def __call__(self, hidden: Value) -> Value:
        scores = self._score(hidden)
        if self._saved is None or self._adapters is None or self._adapters.step is None:
            return scores
        return self._operations.add_head_adapted(self._saved, hidden, scores, self._adapters.step)

    def slots(self) -> WeightSlots:
        return self._score.slots((SCORE,))


class LlamaLikeClassifier(LlamaLike):
    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        self._head = ScoreHead(config, context)
        self.slots |= self._stage.at_exit(self._head.slots())
