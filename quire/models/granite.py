"""Granite 3: LLaMA with factors of embeddings, block results, scores and logits."""

from __future__ import annotations

from quire.config.hf_config import model_fields
from quire.config.model import ModelConfig
from quire.layers.context import LayerContext
from quire.models.dense import DenseDecoder, DenseStyle


def granite(config: ModelConfig, context: LayerContext) -> DenseDecoder:
    fields = model_fields(config)
    style = DenseStyle(
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_factor=fields.number("embedding_multiplier", 1.0),
        residual_factor=fields.number("residual_multiplier", 1.0),
        logits_factor=1.0 / fields.number("logits_scaling", 1.0),
    )
    return DenseDecoder(config, context, style)
