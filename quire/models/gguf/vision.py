"""Tensors of a vision tower's GGUF file under the tower's names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from quire.config.gguf_vision import SECOND_FRAME
from quire.config.vision import VisionConfig
from quire.errors import ModelLoadError
from quire.models.gguf.weights import PLAIN_DTYPES, taken_apart
from quire.utils.gguf import GGUFFile, TensorEntry

_POOLED = {
    "v.patch_embd": "embeddings.patch_embedding",
    "v.position_embd": "embeddings.position_embedding",
    "v.post_ln": "post_layernorm",
    "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
}
_PROJECTION = "mm.input_projection.weight"
_POOLED_LAYER = {
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")},
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_USUAL = {"v.patch_embd": "patch_embed.proj", "v.position_embd": "pos_embed"}
_PLAIN_LAYER = {"attn_qkv": "attn.qkv", "attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2"}
_MERGED = {"v.post_ln": "merger.norm", "mm.0": "merger.linear_fc1", "mm.2": "merger.linear_fc2"}
_GATED = {"v.post_ln": "merger.ln_q", "mm.0": "merger.mlp.0", "mm.2": "merger.mlp.2"}
_LAYER = re.compile(r"v\.blk\.(\d+)\.(\w+)")
_DEEPSTACK = re.compile(r"v\.deepstack\.(\d+)\.(norm|fc1|fc2)")
_IN_THREE = re.compile(r"(v\.blk\.\d+\.attn_)q(\.\w+)")


def tower_tensors(path: Path, config: VisionConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a tower's GGUF file by slot names of VisionTower, at load. Raises ModelLoadError for unknown
    tensors."""
    with GGUFFile(path) as file:
        names = _names(config, is_swapped=_is_swapped(file, config))
        for name, entry in file.tensors.items():
            if name == SECOND_FRAME or (re.search(r"attn_[kv]\.", name) and not config.is_pooled):
                continue
            tensor = _read(file, entry)
            if name == "v.patch_embd.weight" and SECOND_FRAME in file.tensors:
                tensor = torch.stack((tensor, _read(file, file.tensors[SECOND_FRAME])), dim=2)
            found = None if config.is_pooled else _IN_THREE.fullmatch(name)
            if found is not None:
                others = [file.tensors.get(f"{found[1]}{part}{found[2]}") for part in ("k", "v")]
                if None in others:
                    raise ModelLoadError(f"{path}: keys or values of {name!r} are missing")
                tensor = torch.cat([tensor, *(_read(file, each) for each in others if each is not None)])
                name = f"{found[1]}qkv{found[2]}"
            if name == "mm.soft_emb_norm.weight":
                tensor = tensor.float() - 1.0  # stored with the 1 that is added to it
            yield _tower_name(name, names, config, path), tensor


def _names(config: VisionConfig, *, is_swapped: bool) -> tuple[Mapping[str, str], Mapping[str, str]]:
    if config.is_pooled:
        layer = dict(_POOLED_LAYER)
        if is_swapped:
            layer["ffn_up"], layer["ffn_down"] = layer["ffn_down"], layer["ffn_up"]
        return _POOLED, layer
    if config.is_gated:
        mlp = {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
        return _USUAL | _GATED, _PLAIN_LAYER | mlp
    return _USUAL | _MERGED, _PLAIN_LAYER | {"ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"}


def _is_swapped(file: GGUFFile, config: VisionConfig) -> bool:
    first = file.tensors.get("v.blk.0.ffn_up.weight")
    return first is not None and first.shape == (config.hidden_size, config.intermediate_size)


def _tower_name(name: str, names: tuple[Mapping[str, str], Mapping[str, str]], config: VisionConfig, path: Path) -> str:
    if name == _PROJECTION and config.is_pooled:
        return "multi_modal_projector.mm_input_projection_weight"
    module, _, suffix = name.rpartition(".")
    top, of_layer = names
    if module in top:
        return f"{top[module]}.{suffix}"
    layer, deepstack = _LAYER.fullmatch(module), _DEEPSTACK.fullmatch(module)
    if layer is not None and layer[2] in of_layer:
        return f"{'encoder.layers' if config.is_pooled else 'blocks'}.{layer[1]}.{of_layer[layer[2]]}.{suffix}"
    if deepstack is not None and int(deepstack[1]) in config.deepstack_layers:
        own = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}[deepstack[2]]
        return f"deepstack_merger_list.{config.deepstack_layers.index(int(deepstack[1]))}.{own}.{suffix}"
    raise ModelLoadError(f"{path}: tensor {name!r} does not belong to such a tower")


def _read(file: GGUFFile, entry: TensorEntry) -> torch.Tensor:
    rows = np.frombuffer(file.data(entry), dtype=np.uint8)
    dtype = PLAIN_DTYPES.get(entry.type.name)
    if dtype is not None:
        return torch.from_numpy(rows.copy()).view(dtype).view(entry.shape)
    try:
        return taken_apart(rows.reshape(entry.shape[0], -1), entry.type).dequantize().view(entry.shape)
    except ModelLoadError as error:
        raise ModelLoadError(f"tensor {entry.name!r}: {error.message}") from None
