"""Language models with three rotary positions per token: Qwen2.5-VL, Qwen3-VL and Qwen 3.5."""

from __future__ import annotations

from quire.config.model import ModelConfig
from quire.layers.context import LayerContext
from quire.models.decoder import LlamaLike
from quire.models.mixture import MixtureLlama
from quire.models.qwen_next import HybridDecoder
from quire.multimodal.positions import ROTARY_COLUMNS


class QwenVLText(LlamaLike):
    columns = ROTARY_COLUMNS


class QwenVLMixtureText(MixtureLlama):
    columns = ROTARY_COLUMNS


class QwenVLHybridText(HybridDecoder):
    """HybridDecoder with position columns if the checkpoint has a vision tower; else a token's three positions are
    equal."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        if config.vision is not None:
            self.columns = ROTARY_COLUMNS
        super().__init__(config, context)
