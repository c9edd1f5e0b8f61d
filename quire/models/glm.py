"""GLM 4 (0414): norms before and after the blocks; rotation in `quire/config/families/glm.py`."""

from __future__ import annotations

from quire.config.model import ModelConfig
from quire.layers.context import LayerContext
from quire.models.dense import BlockNorms, DenseDecoder, DenseStyle

AROUND = BlockNorms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")


def glm4(config: ModelConfig, context: LayerContext) -> DenseDecoder:
    return DenseDecoder(config, context, DenseStyle(norms=AROUND))
