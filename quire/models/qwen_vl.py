"""The language models of Qwen3-VL: those of Qwen 3, rotated by three positions of each token."""

from __future__ import annotations

from quire.layers.batch import ROTARY_AXES
from quire.models.decoder import LlamaLike
from quire.models.mixture import MixtureLlama


class QwenVLText(LlamaLike):
    columns = ROTARY_AXES


class QwenVLMixtureText(MixtureLlama):
    columns = ROTARY_AXES
