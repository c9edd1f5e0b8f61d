"""Mistral: LLaMA with a sliding window, which `ModelConfig.sliding_windows` carries."""

from __future__ import annotations

from quire.config.model import ModelConfig
from quire.layers.context import LayerContext
from quire.models.decoder import LlamaLike, LlamaTraits


class MistralForCausalLM(LlamaLike):
    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__(config, context, LlamaTraits())
