"""Qwen 2, 2.5 and 3 (dense)."""

from __future__ import annotations

from quire.config.hf_config import model_fields
from quire.config.model import ModelConfig
from quire.layers.context import LayerContext
from quire.models.decoder import LlamaLike, LlamaTraits


class Qwen2ForCausalLM(LlamaLike):
    """Query, key and value projections have a bias, the others none."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__(config, context, LlamaTraits(qkv_bias=True))


class Qwen3ForCausalLM(LlamaLike):
    """Norms over query and key heads; `attention_bias` of config.json gives the projections a bias."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        bias = model_fields(config).boolean("attention_bias", False)
        super().__init__(config, context, LlamaTraits(qkv_bias=bias, output_bias=bias, head_norms=True))
