"""Qwen3-Next and Qwen 3.5: a gated delta rule in three of four layers, gated attention in the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.config.families.family import EXPERT, NEVER, Family, GGUFNames, Layer, first
from quire.config.families.llama import GGUF_LAYER, GGUF_TOP, LLAMA_VALUES, gguf_experts
from quire.config.families.qwen import GGUF_SHARED
from quire.config.hf_json import Fields
from quire.config.model_shape import AttentionShape
from quire.config.rope import RopeDefaults


def _delta_rule(fields: Fields, hidden: int) -> Layer:
    num_keys = first(fields, "linear_num_key_heads", default=16)
    num_values = first(fields, "linear_num_value_heads", default=32)
    key_dim = first(fields, "linear_key_head_dim", default=128)
    value_dim = first(fields, "linear_value_head_dim", default=128)
    kernel = first(fields, "linear_conv_kernel_dim", default=4)
    value = num_values * value_dim
    mixed = 2 * num_keys * key_dim + value
    projections = ((hidden, mixed + value), (hidden, 2 * num_values), (value, hidden))
    attention = AttentionShape(
        "state", num_keys, num_values, key_dim, value_dim, conv_channels=mixed, conv_inputs=kernel - 1
    )
    return attention, projections, mixed * kernel + 2 * num_values + value_dim


def _delta_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    every = first(fields, "full_attention_interval", default=4)
    return tuple((layer + 1) % every != 0 for layer in range(num_layers))


_GGUF_STATE = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_GGUF_GATES = {"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"}
_GGUF_EXPERTS = gguf_experts("mlp.gate", f"mlp.experts.{EXPERT}", "gate_proj", "up_proj", "down_proj") | GGUF_SHARED


def _gguf(
    architecture: str, layer: Mapping[str, str], *, tiled: bool, settings: Mapping[str, object] | None = None
) -> GGUFNames:
    names = {name: place for name, place in layer.items() if name != "ffn_norm"}
    return GGUFNames(architecture, GGUF_TOP, names, norm_offset=1.0, tiled=tiled, settings=settings or {})


_VALUES = LLAMA_VALUES | {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": None,
    "full_attention_interval": 4,
}
_EXPERT_VALUES = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}
_VISION_ROPE = RopeDefaults(share=0.25, mrope_section=(11, 11, 10), mrope_interleaved=True)
_NEXT = Family(
    "",
    is_runnable=True,
    intermediate=("intermediate_size", "moe_intermediate_size"),
    mlp_bias=NEVER,
    head_norms="head",
    head_dim=256,
    output_gate=True,
    has_experts=True,
    has_shared_gate=True,
    state_layer=_delta_rule,
    state_layers=_delta_layers,
    draft_prefix="mtp.",
    rope=RopeDefaults(share=0.25),
)
FAMILIES = (
    replace(
        _NEXT,
        model_type="qwen3_next",
        architectures=("Qwen3NextForCausalLM",),
        usual_values=_VALUES
        | _EXPERT_VALUES
        | {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": True},
        gguf=_gguf(
            "qwen3next",
            _GGUF_EXPERTS | _GGUF_STATE | {"ssm_ba": "linear_attn.in_proj_ba"},
            tiled=False,
            settings={"norm_topk_prob": True, "projections_apart": True},
        ),
    ),
    replace(
        _NEXT,
        model_type="qwen3_5_text",
        architectures=("Qwen3_5ForCausalLM",),
        aliases=("qwen3_5",),
        rope=_VISION_ROPE,
        usual_values=_VALUES | {"num_key_value_heads": 4},
        gguf=_gguf("qwen35", GGUF_LAYER | _GGUF_STATE | _GGUF_GATES, tiled=True),
    ),
    replace(
        _NEXT,
        model_type="qwen3_5_moe_text",
        architectures=("Qwen3_5MoeForCausalLM",),
        aliases=("qwen3_5_moe",),
        rope=_VISION_ROPE,
        usual_values=_VALUES | _EXPERT_VALUES | {"num_experts": 256, "num_experts_per_tok": 8},
        gguf=_gguf("qwen35moe", _GGUF_EXPERTS | _GGUF_STATE | _GGUF_GATES, tiled=True),
    ),
)
