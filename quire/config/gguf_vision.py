from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from quire.config.hf_json import Fields
from quire.config.model import MAX_LAYERS, MAX_WIDTH
from quire.config.vision import IMAGE_MARKS
from quire.config.vision import IMAGE_TOKENS as TOKENS_KEY
from quire.errors import ModelLoadError
from quire.utils.gguf import SUFFIX, GGUFFile, is_mmproj

ARCHITECTURE = "clip"
PROJECTORS: Mapping[str, str] = {
    "gemma3": "Gemma3ForCausalLM",
    "qwen3vl_merger": "Qwen3VLForCausalLM",
    "qwen2.5vl_merger": "Qwen2_5_VLForCausalLM",
}
"""Supported projectors, and their language models."""
IMAGE_TOKENS = ("<|image_pad|>", "<image_soft_token>")
MARKS = ("<start_of_image>", "<end_of_image>")
MIN_TOKENS, MAX_TOKENS = 8, 4096
"""Tokens of an image where a file has no limits, as in llama.cpp."""
SECOND_FRAME = "v.patch_embd.weight.1"


class Tower(NamedTuple):
    """Vision tower of a GGUF file (llama.cpp's mmproj). vision: `vision_config`. processor: preprocessor_config.json.
    architecture: language model's."""

    vision: dict[str, Any]
    processor: dict[str, Any]
    architecture: str


def find_mmproj(model: Path) -> Path | None:
    """Tower's file beside a GGUF model; None if there is none or several."""
    found = [path for path in model.parent.glob(f"*{SUFFIX}") if is_mmproj(path)]
    return found[0] if len(found) == 1 else None


def read_tower(path: Path) -> Tower:
    """Read a tower's metadata. Raises ModelLoadError for other files, and for metadata that is missing, absurd or not
    supported."""
    with GGUFFile(path) as file:
        return _tower(file)


def _tower(file: GGUFFile) -> Tower:
    whole = Fields(file.metadata, str(file.path))
    if file.metadata.get("general.architecture") != ARCHITECTURE:
        raise file.error("it is no vision tower (general.architecture is not 'clip'): mmproj needs one")
    kind = str(file.metadata.get("clip.vision.projector_type") or file.metadata.get("clip.projector_type"))
    if kind not in PROJECTORS:
        raise whole.error(f"projector_type {kind!r:.50} is not supported (known: {', '.join(PROJECTORS)})")
    prefix = "clip.vision."
    own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    fields = Fields(own, f"{file.path} (clip.vision)")
    mean, deviation = (file.numbers(f"{prefix}{key}") for key in ("image_mean", "image_std"))
    processor: dict[str, Any] = {"image_mean": mean or [0.5] * 3, "image_std": deviation or [0.5] * 3}
    num_layers = fields.integer("block_count", maximum=MAX_LAYERS)
    vision: dict[str, Any] = {
        "hidden_size": fields.integer("embedding_length", maximum=MAX_WIDTH),
        "intermediate_size": fields.integer("feed_forward_length", maximum=MAX_WIDTH),
        "patch_size": fields.integer("patch_size", maximum=MAX_WIDTH),
    }
    heads = fields.integer("attention.head_count")
    if kind == "gemma3":
        size = fields.integer("image_size", maximum=MAX_WIDTH)
        side = size // vision["patch_size"] // fields.integer("projector.scale_factor", 4)
        vision |= {
            "num_attention_heads": heads,
            "num_hidden_layers": num_layers,
            "image_size": size,
            "layer_norm_eps": fields.number("attention.layer_norm_epsilon", 1e-6),
            TOKENS_KEY: side**2,
        }
        return Tower(vision, processor | {"size": {"height": size, "width": size}}, PROJECTORS[kind])
    merge = fields.integer("spatial_merge_size", 2, maximum=MAX_WIDTH)
    frames = 2 if SECOND_FRAME in file.tensors else 1
    pixels = (vision["patch_size"] * merge) ** 2
    limits = {
        "shortest_edge": fields.integer("image_min_pixels", MIN_TOKENS * pixels),
        "longest_edge": fields.integer("image_max_pixels", MAX_TOKENS * pixels),
    }
    sizes = {"patch_size": vision["patch_size"], "merge_size": merge, "temporal_patch_size": frames}
    vision |= {
        "depth": num_layers,
        "num_heads": heads,
        "spatial_merge_size": merge,
        "temporal_patch_size": frames,
        "out_hidden_size": fields.integer("projection_dim", maximum=MAX_WIDTH),
    }
    vision |= _qwen2_keys(fields, num_layers) if kind.startswith("qwen2") else _qwen3_keys(file, prefix)
    return Tower(vision, processor | sizes | {"size": limits}, PROJECTORS[kind])


def _qwen2_keys(fields: Fields, num_layers: int) -> dict[str, Any]:
    every = fields.integer("n_wa_pattern")
    whole = [layer for layer in range(num_layers) if (layer + 1) % every == 0]
    return {"window_size": fields.integer("window_size", 112), "fullatt_block_indexes": whole, "hidden_act": "silu"}


def _qwen3_keys(file: GGUFFile, prefix: str) -> dict[str, Any]:
    positions = file.tensors.get("v.position_embd.weight")
    if positions is None:
        raise file.error("the tensor 'v.position_embd.weight' is missing")
    flags = file.numbers(f"{prefix}is_deepstack_layers") or []
    return {
        "num_position_embeddings": positions.shape[0],
        "deepstack_visual_indexes": [layer for layer, is_one in enumerate(flags) if is_one],
        "hidden_act": "gelu_pytorch_tanh",
    }


def with_tower(config: Mapping[str, Any], model: Path, path: Path) -> dict[str, Any]:
    """config.json of the GGUF file `model` with `vision_config` from the tower's file `path`. Raises ModelLoadError if
    they do not belong together."""
    tower = read_tower(path)
    if tower.architecture not in config["architectures"]:
        raise ModelLoadError(f"{path}: its tower is of a {tower.architecture}, and {model} is none")
    with GGUFFile(model) as file:
        tokens = file.places("tokenizer.ggml.tokens", (*IMAGE_TOKENS, *MARKS))
    found = {**config, "vision_config": tower.vision}
    placeholder = next((tokens[name] for name in IMAGE_TOKENS if name in tokens), None)
    if placeholder is not None:
        found["image_token_id"] = placeholder
    found |= {key: tokens[name] for key, name in zip(IMAGE_MARKS, MARKS, strict=True) if name in tokens}
    return found
