"""Models with latent attention or delta nets written as GGUF files, as llama.cpp's converters write them: what goes
beyond the names and sizes of `tests/fakes/gguf_model.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from transformers import PreTrainedModel

from tests.fakes.gguf import TYPE_NUMBERS, GGUFWriter, StoredTensor, quantize, typed
from tests.fakes.gguf_model import NAMES, SHARED_EXPERT, metadata, stacks

LATENT = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
STATE = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
}
Named = tuple[str, torch.Tensor]


def write_layers(
    model: PreTrainedModel, architecture: str, types: Mapping[str, str] | None = None, *, is_old: bool = False
) -> GGUFWriter:
    """types: of matrices, by their short name; F32 where absent. is_old: as files of latent attention were before the
    matrices that expand keys and values were taken apart."""
    types = types or {}
    is_latent = architecture == "deepseek2"
    writer = GGUFWriter(metadata(model, architecture))
    keys = latent_keys(model, is_old=is_old) if is_latent else state_keys(model)
    writer.metadata |= {f"{architecture}.{key}": typed(value) for key, value in keys.items() if value is not None}
    for name, weight in model.state_dict().items():
        if "experts." in name and "shared" not in name:
            writer.tensors |= stacks(name, weight, types, takes_turns=False)
            continue
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        parts = latent_parts(model, name, weight, is_old=is_old) if is_latent else state_parts(model, name, weight)
        for short, part in parts:
            kind = types.get(short.split(".")[-2], "F32") if part.dim() > 1 else "F32"
            data = quantize(kind, part.float().contiguous())
            writer.tensors[short] = StoredTensor(TYPE_NUMBERS[kind], tuple(part.shape), data)
    return writer


def short(name: str, own: Mapping[str, str]) -> str:
    module, suffix = name.rsplit(".", 1)
    if not module.startswith("model.layers."):
        return f"{NAMES[module]}.{suffix}"
    index, rest = module.removeprefix("model.layers.").split(".", 1)
    return f"blk.{index}.{(NAMES | SHARED_EXPERT | own)[rest]}.{suffix}"


# Latent attention.


def latent_parts(model: PreTrainedModel, name: str, weight: torch.Tensor, *, is_old: bool) -> Iterator[Named]:
    config = model.config
    if name.endswith("e_score_correction_bias"):
        yield f"blk.{name.split('.')[2]}.exp_probs_b.bias", weight
    elif name.endswith("kv_b_proj.weight") and not is_old:
        heads = weight.view(config.num_attention_heads, -1, config.kv_lora_rank)
        layer = name.split(".")[2]
        yield f"blk.{layer}.attn_k_b.weight", heads[:, : config.qk_nope_head_dim].transpose(1, 2)
        yield f"blk.{layer}.attn_v_b.weight", heads[:, config.qk_nope_head_dim :]
    else:
        yield short(name, LATENT), weight


def latent_keys(model: PreTrainedModel, *, is_old: bool) -> dict[str, object]:
    config, settings = model.config, model.config.rope_parameters
    key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    keys: dict[str, object] = {
        "rope.dimension_count": config.qk_rope_head_dim,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": True if config.norm_topk_prob else None,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }
    if config.model_type == "deepseek_v3":
        keys["expert_gating_func"] = 2
    if is_old:
        keys |= {"attention.key_length": key, "attention.value_length": value}
    else:
        rank = config.kv_lora_rank
        keys |= {"attention.head_count_kv": 1}
        keys |= {"attention.key_length": rank + config.qk_rope_head_dim, "attention.value_length": rank}
        keys |= {"attention.key_length_mla": key, "attention.value_length_mla": value}
    if settings["rope_type"] == "yarn":
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": settings["factor"]}
        keys["rope.scaling.original_context_length"] = settings["original_max_position_embeddings"]
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * settings["mscale_all_dim"]
    return keys


# Delta nets.


def state_parts(model: PreTrainedModel, name: str, weight: torch.Tensor) -> Iterator[Named]:
    config = model.config
    is_tiled = config.model_type != "qwen3_next"
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        weight = weight + 1.0
    if ".shared_expert_gate." in name:
        weight = weight[0]
    if ".linear_attn." in name and is_tiled:
        weight = tiled(model, name.split("linear_attn.")[1], weight)
    layer = name.split(".")[2] if name.startswith("model.layers.") else ""
    if name.endswith("A_log"):
        yield f"blk.{layer}.ssm_a", -weight.exp()
    elif name.endswith("dt_bias"):
        yield f"blk.{layer}.ssm_dt.bias", weight
    elif name.endswith("conv1d.weight"):
        yield short(name, STATE), weight[:, 0]
    elif name.endswith("in_proj_qkvz.weight"):
        by_head = weight.view(config.linear_num_key_heads, -1, weight.shape[1])
        key, values = config.linear_key_head_dim, (by_head.shape[1] - 2 * config.linear_key_head_dim) // 2
        parts = [part.flatten(0, 1) for part in by_head.split((key, key, values, values), dim=1)]
        assert len(parts[0]) == keys
        yield f"blk.{layer}.attn_qkv.weight", torch.cat(parts[:3])
        yield f"blk.{layer}.attn_gate.weight", parts[3]
    else:
        yield short(name, STATE), weight


def tiled(model: PreTrainedModel, name: str, weight: torch.Tensor) -> torch.Tensor:
    """The first value head of every key head, then the second of every one."""
    config = model.config
    keys, size = config.linear_num_key_heads, config.linear_value_head_dim
    first = 2 * keys * config.linear_key_head_dim

    def turn(rows: torch.Tensor, size: int) -> torch.Tensor:
        heads = rows.reshape(keys, len(rows) // keys // size, size, *rows.shape[1:])
        return heads.transpose(0, 1).reshape(rows.shape)

    if name in ("in_proj_qkv.weight", "conv1d.weight"):
        return torch.cat((weight[:first], turn(weight[first:], size)))
    if name == "in_proj_z.weight":
        return turn(weight, size)
    if name == "out_proj.weight":
        return turn(weight.t(), size).t()
    return weight if name == "norm.weight" else turn(weight, 1)


def state_keys(model: PreTrainedModel) -> dict[str, object]:
    config = model.config
    keys: dict[str, object] = {
        "rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
    }
    if getattr(config, "num_experts", None):
        keys |= {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
        keys["expert_feed_forward_length"] = config.moe_intermediate_size
        keys["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    return keys
