"""Hugging Face models written as GGUF files, as converters write them."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tests.fakes.gguf import (
    BLOCKS,
    GRID_BLOCKS,
    TYPE_NUMBERS,
    GGUFWriter,
    StoredTensor,
    Typed,
    dequantize,
    quantize,
    typed,
)

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SHARED_EXPERT = {
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
GPT_OSS = {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""What has another name in Gemma's files; norms are stored with the 1 that is added to them."""
MIXED = {
    "token_embd": "Q4_K",
    "output": "Q6_K",
    "attn_q": "Q4_K",
    "attn_k": "Q8_0",
    "attn_v": "Q6_K",
    "attn_output": "Q8_0",
    "ffn_gate": "Q4_0",
    "ffn_up": "F16",
    "ffn_down": "BF16",
}
"""A type for each matrix, so that every type occurs."""

WIDE = {
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""Sizes that blocks of 256 divide."""


def short_name(name: str, architecture: str) -> str:
    """A Hugging Face tensor's name in GGUF."""
    if name.endswith("self_attn.sinks"):
        return f"blk.{name.split('.')[2]}.attn_sinks.weight"
    names = NAMES | SHARED_EXPERT | {"gpt-oss": GPT_OSS, "gemma2": GEMMA, "gemma3": GEMMA}.get(architecture, {})
    module, suffix = name.rsplit(".", 1)
    if module.startswith("model.layers."):
        index, rest = module.removeprefix("model.layers.").split(".", 1)
        return f"blk.{index}.{names[rest]}.{suffix}"
    return f"{names[module]}.{suffix}"


def pairs_together(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows in the order of LLaMA's original code: the two of a rotated pair side by side."""
    head_dim = weight.shape[0] // num_heads
    rows = []
    for head in range(num_heads):
        for pair in range(head_dim // 2):
            rows += [weight[head * head_dim + pair], weight[head * head_dim + pair + head_dim // 2]]
    return torch.stack(rows)


def halves_apart(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The way back."""
    order = pairs_together(torch.arange(weight.shape[0]), num_heads)
    result = torch.empty_like(weight)
    result[order] = weight
    return result


def to_gguf(
    model: PreTrainedModel, architecture: str, types: dict[str, str] | None = None
) -> tuple[GGUFWriter, dict[str, torch.Tensor]]:
    """The file, and the weights that it stands for under Hugging Face's names. types: of matrices, by their short
    name ("experts": of those of experts that have none of their own); F32 where absent."""
    config = model.config
    writer = GGUFWriter(metadata(model, architecture))
    stored: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        if "experts." in name:
            writer.tensors |= stacks(name, weight, types or {}, takes_turns=architecture == "gpt-oss")
            continue
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        short = short_name(name, architecture)
        kind = short.split(".")[-2]
        type_name = (types or {}).get(kind, "F32") if weight.dim() == 2 else "F32"
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(kind)
        moves = architecture == "llama" and heads is not None
        placed = pairs_together(weight, heads) if moves else weight
        if architecture.startswith("gemma") and kind.endswith("_norm"):
            placed = placed + 1.0
        data = quantize(type_name, placed.float())
        blocks = BLOCKS | GRID_BLOCKS
        assert type_name not in blocks or weight.shape[-1] % blocks[type_name][0] == 0
        shape = tuple(weight.shape[1:] if "inp_shexp" in short else weight.shape)
        writer.tensors[short] = StoredTensor(TYPE_NUMBERS[type_name], shape, data)
        back = dequantize(type_name, data, weight.shape)
        stored[name] = halves_apart(back, heads) if moves else back
    return writer, stored


def stacks(name: str, weight: torch.Tensor, types: dict[str, str], *, takes_turns: bool) -> dict[str, StoredTensor]:
    """The matrices or biases of all experts, gate and up apart. takes_turns: as GPT-OSS has them, [in, out], a row of
    one behind a row of the other."""
    _, _, layer, _, _, tensor = name.split(".")
    suffix = "bias" if tensor.endswith("_bias") else "weight"
    if takes_turns and suffix == "weight":
        weight = weight.transpose(1, 2)
    parts = {"ffn_down_exps": weight}
    if tensor.startswith("gate_up"):
        halves = (weight[:, 0::2], weight[:, 1::2]) if takes_turns else weight.chunk(2, dim=1)
        parts = dict(zip(("ffn_gate_exps", "ffn_up_exps"), halves, strict=True))
    found = {}
    for short, part in parts.items():
        kind = types.get(short, types.get("experts", "F32")) if suffix == "weight" else "F32"
        data = quantize(kind, part.contiguous())
        found[f"blk.{layer}.{short}.{suffix}"] = StoredTensor(TYPE_NUMBERS[kind], tuple(part.shape), data)
    return found


def metadata(model: PreTrainedModel, architecture: str) -> dict[str, Typed]:
    config = model.config
    own = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"]),
    }
    if hasattr(config, "intermediate_size"):
        own["feed_forward_length"] = config.intermediate_size
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        own |= {"attention.key_length": head_dim, "attention.value_length": head_dim, "rope.dimension_count": head_dim}
    values = {"general.architecture": architecture, "general.name": "tiny"}
    values |= {f"{architecture}.{key}": value for key, value in own.items()}
    return {key: typed(value) for key, value in values.items()}


def save_stored(model: PreTrainedModel, stored: dict[str, torch.Tensor], directory: Path) -> Path:
    """A Hugging Face directory with the weights that a GGUF file stands for."""
    model.load_state_dict(stored, strict=False)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    model.save_pretrained(directory)
    return directory


def rope_divisors(head_dim: int, theta: float, factor: float, low: float, high: float, trained: int) -> StoredTensor:
    """LLaMA 3.1's scaling as converters store it: what each frequency is divided by."""
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        if wavelength < trained / high:
            divisors.append(1.0)
        elif wavelength > trained / low:
            divisors.append(factor)
        else:
            kept = (trained / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - kept) / factor + kept))
    return StoredTensor(TYPE_NUMBERS["F32"], (head_dim // 2,), quantize("F32", torch.tensor(divisors)))
