"""Kimi Linear: Kimi delta attention in three of four layers, latent attention in the others, experts."""

from __future__ import annotations

from quire.config.families.family import NEVER, Family, Layer, first
from quire.config.hf_json import Fields
from quire.config.model import MAX_LAYERS
from quire.config.model_shape import AttentionShape


def _delta_attention(fields: Fields, hidden: int) -> Layer:
    own = _own(fields)
    num_heads = first(own, "num_heads", default=first(fields, "linear_num_heads", default=32))
    dim = first(own, "head_dim", default=first(fields, "linear_head_dim", default=128))
    kernel = first(own, "short_conv_kernel_size", default=first(fields, "linear_conv_kernel_dim", default=4))
    width = num_heads * dim
    gates = ((hidden, dim), (dim, width)) * 2
    projections = ((hidden, 3 * width), (hidden, num_heads), *gates, (width, hidden))
    attention = AttentionShape("state", num_heads, num_heads, dim, dim, conv_channels=3 * width, conv_inputs=kernel - 1)
    return attention, projections, 3 * width * kernel + width + num_heads + dim


def _delta_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    listed = _own(fields).values.get("kda_layers")
    if listed is None:
        return tuple(layer % 4 != 0 or layer == 0 for layer in range(num_layers))
    if not isinstance(listed, list) or len(listed) > MAX_LAYERS:
        raise fields.error("kda_layers must list layers")
    return tuple(layer + 1 in listed for layer in range(num_layers))


def _own(fields: Fields) -> Fields:
    own = fields.values.get("linear_attn_config")
    return Fields(own if isinstance(own, dict) else {}, f"{fields.where}: linear_attn_config")


FAMILIES = (
    Family(
        "kimi_linear",
        ("KimiLinearForCausalLM",),
        max_positions=("max_position_embeddings", "model_max_length"),
        mlp_bias=NEVER,
        sparse_from=1,
        corrects_choice=True,
        state_layer=_delta_attention,
        state_layers=_delta_layers,
    ),
)
