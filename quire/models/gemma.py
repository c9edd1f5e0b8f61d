"""Gemma 1, 2 and 3: scaled embeddings, norms that multiply by 1 + weight; from 2 on norms after the blocks too, soft
caps (2) or head norms (3), and windows in most layers."""

from __future__ import annotations

import torch

from quire.config.hf_config import model_fields
from quire.config.hf_json import Fields
from quire.config.model import ModelConfig
from quire.kernels.activation import ACTIVATIONS
from quire.layers.context import LayerContext
from quire.layers.norm import UnitOffsetRMSNorm
from quire.models.dense import BlockNorms, DenseDecoder, DenseStyle
from quire.multimodal.positions import LAST_SEEN

AROUND = BlockNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


def gemma(config: ModelConfig, context: LayerContext) -> DenseDecoder:
    activation = model_fields(config).choice("hidden_act", list(ACTIVATIONS))
    style = DenseStyle(
        norm=UnitOffsetRMSNorm,
        embedding_factor=_embedding_factor(config, context),
        # Old files say "gelu" for models trained with its tanh approximation.
        activation="gelu_pytorch_tanh" if activation == "gelu" else activation,
    )
    return DenseDecoder(config, context, style)


def gemma2(config: ModelConfig, context: LayerContext) -> DenseDecoder:
    fields = model_fields(config)
    return DenseDecoder(config, context, _style(config, context, fields.optional_number("attn_logit_softcapping")))


class ImageDecoder(DenseDecoder):
    """Decoder in which an image's tokens see one another."""

    columns = (LAST_SEEN,)


def gemma3(config: ModelConfig, context: LayerContext) -> DenseDecoder:
    """Build Gemma 3's decoder. Raises ModelLoadError for a final_logit_softcapping in a multimodal configuration, which
    the reference ignores."""
    fields = model_fields(config)
    if config.is_multimodal and fields.values.get("final_logit_softcapping") is not None:
        raise fields.error("final_logit_softcapping is not supported beside images: the reference leaves it out there")
    decoder = DenseDecoder if config.vision is None else ImageDecoder
    return decoder(config, context, _style(config, context, None))


def _style(config: ModelConfig, context: LayerContext, attention_cap: float | None) -> DenseStyle:
    fields: Fields = model_fields(config)
    return DenseStyle(
        norms=AROUND,
        norm=UnitOffsetRMSNorm,
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        attention_cap=attention_cap,
        logits_cap=fields.optional_number("final_logit_softcapping"),
        embedding_factor=_embedding_factor(config, context),
        activation=fields.choice("hidden_activation", list(ACTIVATIONS)),
    )


def _embedding_factor(config: ModelConfig, context: LayerContext) -> float:
    return float(torch.tensor(config.hidden_size**0.5).to(context.dtype))
