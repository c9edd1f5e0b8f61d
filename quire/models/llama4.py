"""LLaMA 4: chunked attention with head norms in rotated layers; others see everything, queries scaled by position."""

from __future__ import annotations

from quire.config.hf_config import model_fields
from quire.config.model import ModelConfig
from quire.kernels.arguments import LengthScale
from quire.layers.context import LayerContext, WeightSlots, prefixed
from quire.layers.mlp import GatedMLP
from quire.layers.norm import UnweightedRMSNorm
from quire.models.config_values import read_activation, usual_rope
from quire.models.decoder import FeedForward
from quire.models.dense import DenseDecoder, DenseStyle
from quire.models.mixture import mixture_block


def llama4(config: ModelConfig, context: LayerContext) -> DenseDecoder:
    """Build Llama 4's decoder. Raises ModelLoadError for head norms with a rotation that scales, because the norms come
    before it."""
    fields = model_fields(config)
    has_norms = fields.boolean("use_qk_norm", True)
    rope = usual_rope(config)
    if has_norms and rope.rope_type in ("yarn", "longrope"):
        raise fields.error(
            "use_qk_norm is not supported beside a rotation of type yarn or longrope, which scales heads"
        )
    scale = None
    if fields.values.get("attn_temperature_tuning", True):  # old files have a number instead of true
        scale = LengthScale(fields.integer("floor_scale", 8192), fields.number("attn_scale", 0.1))
    head_norm = UnweightedRMSNorm if has_norms else None
    return DenseDecoder(config, context, DenseStyle(head_norm=head_norm, length_scale=scale, make_mlp=_feed_forward))


def _feed_forward(config: ModelConfig, context: LayerContext, layer: int) -> tuple[FeedForward, WeightSlots]:
    block = mixture_block(config, context, layer)
    if block is not None:
        return block
    width = config.shape.layers[layer].intermediate
    mlp = GatedMLP(config.hidden_size, width, read_activation(config), bias=False, context=context)
    return mlp, prefixed("feed_forward", mlp.slots())
