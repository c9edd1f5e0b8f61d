"""Decoders that classify: logits of labels from a text's last hidden state."""

from __future__ import annotations

from quire.config.model import ModelConfig
from quire.kernels.value import Value
from quire.layers.context import LayerContext, WeightSlots
from quire.models.decoder import LlamaLike
from quire.models.head import HeadLinear

SCORE = "score"
"""Checkpoint name of the head."""


class ScoreHead:
    """Classification head: a linear layer `score` without bias."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        assert config.pooling is not None, "a classifier pools"
        self.input_size = config.hidden_size
        self._score = HeadLinear(SCORE, self.input_size, len(config.pooling.labels), bias=False, context=context)

    def __call__(self, hidden: Value) -> Value:
        return self._score(hidden)

    def slots(self) -> WeightSlots:
        return self._score.slots()


class LlamaLikeClassifier(LlamaLike):
    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        self._head = ScoreHead(config, context)
        self.slots |= self._stage.at_exit(self._head.slots())
