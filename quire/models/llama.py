"""LLaMA 1 to 3.x."""

from __future__ import annotations

from quire.config.hf_config import model_fields
from quire.config.model import ModelConfig
from quire.layers.context import LayerContext
from quire.models.decoder import LlamaLike, LlamaTraits


class LlamaForCausalLM(LlamaLike):
    """`attention_bias` and `mlp_bias` of config.json give all projections of a block a bias."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        fields = model_fields(config)
        attention_bias = fields.boolean("attention_bias", False)
        traits = LlamaTraits(
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=fields.boolean("mlp_bias", False),
        )
        super().__init__(config, context, traits)
