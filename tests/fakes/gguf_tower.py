"""Models with vision towers written as GGUF files: the language model, and its tower as llama.cpp's mmproj."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from tests.fakes.gguf import TYPE_NUMBERS, GGUFWriter, StoredTensor, Typed, quantize, typed
from tests.fakes.gguf_model import to_gguf

PROJECTORS = {"gemma3": "gemma3", "qwen3vl": "qwen3vl_merger", "qwen2vl": "qwen2.5vl_merger"}
"""By the language model's architecture."""
LAYERS = {
    "gemma3": {
        **{f"self_attn.{name}_proj": f"attn_{name}" for name in ("q", "k", "v", "out")},
        "layer_norm1": "ln1",
        "layer_norm2": "ln2",
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
    },
    "qwen3vl": {
        "attn.qkv": "attn_qkv",
        "attn.proj": "attn_out",
        "norm1": "ln1",
        "norm2": "ln2",
        "mlp.linear_fc1": "ffn_up",
        "mlp.linear_fc2": "ffn_down",
    },
    "qwen2vl": {
        "attn.proj": "attn_out",
        "norm1": "ln1",
        "norm2": "ln2",
        **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    },
}
TOP = {
    "gemma3": {"post_layernorm": "v.post_ln", "embeddings.position_embedding": "v.position_embd"},
    "qwen3vl": {"merger.norm": "v.post_ln", "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2"}
    | {"pos_embed": "v.position_embd"},
    "qwen2vl": {"merger.ln_q": "v.post_ln", "merger.mlp.0": "mm.0", "merger.mlp.2": "mm.2"},
}


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """The language model of one with images, as much as `to_gguf` needs of it."""
    tensors = {f"model.{name}": tensor for name, tensor in model.model.language_model.state_dict().items()}
    config = deepcopy(model.config.text_config)
    config.tie_word_embeddings = model.lm_head.weight is model.get_input_embeddings().weight
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = model.lm_head.weight.detach()
    return cast("PreTrainedModel", SimpleNamespace(config=config, state_dict=lambda: tensors))


def write_model(
    model: PreTrainedModel, architecture: str, path: Path, words: dict[str, int], keys: dict[str, Any]
) -> Path:
    """The language model's file. words: special tokens and their ids. keys: further metadata."""
    writer, _ = to_gguf(text_model(model), architecture)
    vocabulary = [f"w{number}" for number in range(model.config.text_config.vocab_size)]
    for word, token_id in words.items():
        vocabulary[token_id] = word
    writer.metadata["tokenizer.ggml.tokens"] = Typed(typed([""]).kind, vocabulary)
    writer.metadata |= {f"{architecture}.{key}": typed(value) for key, value in keys.items()}
    return writer.write(path)


def write_tower(
    model: PreTrainedModel,
    architecture: str,
    path: Path,
    keys: dict[str, Any],
    kind_of: Callable[[str, torch.Tensor], str] = lambda name, tensor: "F32",
) -> Path:
    """The tower's file. keys: metadata under clip.vision. kind_of: type of a matrix, by its name in the file."""
    writer = GGUFWriter({"general.architecture": typed("clip"), "clip.has_vision_encoder": typed(True)})
    writer.metadata["clip.vision.projector_type"] = typed(PROJECTORS[architecture])
    writer.metadata |= {f"clip.vision.{key}": typed(value) for key, value in keys.items()}

    def put(name: str, tensor: torch.Tensor) -> None:
        kind = kind_of(name, tensor) if tensor.dim() > 1 and "position" not in name else "F32"
        data = quantize(kind, tensor.detach().float().contiguous())
        writer.tensors[name] = StoredTensor(TYPE_NUMBERS[kind], tuple(tensor.shape), data)

    inner = model.model
    tower = inner.vision_tower if architecture == "gemma3" else inner.visual
    for name, tensor in tower.state_dict().items():
        module, suffix = name.rsplit(".", 1)
        parts = module.split(".")
        if module in ("embeddings.patch_embedding", "patch_embed.proj"):
            frames = tensor.unbind(2) if tensor.dim() == 5 else (tensor,)
            for number, frame in enumerate(frames):
                put(f"v.patch_embd.{suffix}" + (f".{number}" if number else ""), frame)
        elif module in TOP[architecture]:
            put(f"{TOP[architecture][module]}.{suffix}", tensor)
        elif parts[0] == "deepstack_merger_list":
            layer = model.config.vision_config.deepstack_visual_indexes[int(parts[1])]
            put(f"v.deepstack.{layer}.{parts[2].removeprefix('linear_')}.{suffix}", tensor)
        elif parts[0] in ("blocks", "encoder"):
            layer, own = (parts[1], parts[2:]) if parts[0] == "blocks" else (parts[2], parts[3:])
            if own == ["attn", "qkv"] and architecture == "qwen2vl":
                for part, third in zip("qkv", tensor.chunk(3), strict=True):
                    put(f"v.blk.{layer}.attn_{part}.{suffix}", third)
            else:
                put(f"v.blk.{layer}.{LAYERS[architecture]['.'.join(own)]}.{suffix}", tensor)
    if architecture == "gemma3":
        projector = inner.multi_modal_projector
        put("mm.input_projection.weight", projector.mm_input_projection_weight)
        put("mm.soft_emb_norm.weight", projector.mm_soft_emb_norm.weight + 1.0)
    return writer.write(path)
