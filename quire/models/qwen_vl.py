"""The language models of Qwen3-VL: those of Qwen 3, rotated by three positions of each token."""

from __future__ import annotations

from quire.models.decoder import LlamaLike
from quire.models.mixture import MixtureLlama
from quire.multimodal.positions import ROTARY_COLUMNS


class QwenVLText(LlamaLike):
    columns = ROTARY_COLUMNS


class QwenVLMixtureText(MixtureLlama):
    columns = ROTARY_COLUMNS
