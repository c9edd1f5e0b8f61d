"""OLMo 2 and 3: norms only after the blocks, and over whole queries and keys."""

from __future__ import annotations

from quire.config.model import ModelConfig
from quire.layers.context import LayerContext
from quire.models.dense import BlockNorms, DenseDecoder, DenseStyle

BEHIND = BlockNorms("", "post_attention_layernorm", "", "post_feedforward_layernorm")


def olmo(config: ModelConfig, context: LayerContext) -> DenseDecoder:
    return DenseDecoder(config, context, DenseStyle(norms=BEHIND))
