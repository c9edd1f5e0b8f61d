"""GGUF files from Hugging Face directories, one tensor in memory at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from quire.config.gguf import ROPE_FACTORS
from quire.config.gguf_export import Description, TensorPlace
from quire.config.gguf_mixes import MixedModel, tensor_type
from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.models.checkpoint_names import CheckpointNames
from quire.models.gguf.encode import NUMBERS, TYPES, encode
from quire.models.gguf.importance import Importance, importance_of
from quire.models.loader import checkpoint_tensors
from quire.models.tied_head import with_head_of
from quire.models.weight_files import Progress, WeightFiles, find_weights
from quire.quantization.file_tensor import FileTensor
from quire.utils.gguf_writer import GGUFWriter, PlannedTensor, Value


@dataclass(frozen=True)
class Recipe:
    """Types and importance for `quire quantize`. mix: name of `MIXES`. importance: per column; None: equal.
    importance_from: its file, for errors."""

    mix: str
    importance: Importance | None = None
    importance_from: str = ""


def open_weights(config: ModelConfig) -> tuple[ModelConfig, WeightFiles]:
    """Weights of a directory to quantize, and the configuration with the head that they have. Raises ModelLoadError."""
    files = find_weights(config.path, "auto")
    if not isinstance(files, WeightFiles):
        raise ModelLoadError(
            f"{config.path}: a GGUF file is made of a Hugging Face directory, not of another GGUF file"
        )
    config, files.head_holds = with_head_of(config, files)
    return config, files


def plan_tensors(config: ModelConfig, description: Description, recipe: Recipe) -> list[PlannedTensor]:
    experts = config.shape.layers[0].experts
    model = MixedModel(
        config.num_layers,
        config.num_heads // config.num_kv_heads,
        config.shape.is_tied,
        description.is_large,
        recipe.importance is not None,
        0 if experts is None else experts.num_experts,
    )
    kinds = {name: tensor_type(name, shape, recipe.mix, model) for name, shape in description.shapes.items()}
    return [
        PlannedTensor(name, shape, TYPES[kinds[name]], NUMBERS[kinds[name]])
        for name, shape in description.shapes.items()
    ]


def write_gguf(
    config: ModelConfig,
    files: WeightFiles,
    description: Description,
    recipe: Recipe,
    output: tuple[Path, Mapping[str, Value]],
    check: Callable[[Path], None],
    report: Progress,
    num_threads: int,
) -> Counter[str]:
    """Write the file of `quire quantize`. output: path and extra metadata. check: called with the file once its header
    is written; raises if that is wrong. Returns bytes by type. Raises ModelLoadError and UserError."""
    path, more = output
    planned = plan_tensors(config, description, recipe)
    by_name = {tensor.name: tensor for tensor in planned}
    with GGUFWriter(path, {**description.metadata, **more}, planned) as writer, ThreadPoolExecutor(num_threads) as pool:
        if description.rope_factors:  # comes from the configuration, not from a weight file
            writer.write(ROPE_FACTORS, np.array(description.rope_factors, dtype="<f4").tobytes())
        check(writer.partial)
        for source, place, tensor in _placed(config, files, description, report):
            kind, columns = by_name[place.name].type.name, tensor.shape[-1]
            try:
                counts = None
                if recipe.importance is not None and tensor.dim() == 2:
                    counts = importance_of(recipe.importance, place, columns, recipe.importance_from)
                encoded = encode(tensor.view(-1, columns), kind, counts, pool)
            except ModelLoadError as error:
                raise ModelLoadError(f"{files.current}: tensor {source!r}: {error.message}") from None
            writer.write(place.name, encoded.data.cast("B"), (place.expert or 0) * encoded.nbytes)
        writer.finish()
    sizes: Counter[str] = Counter()
    for each in planned:
        sizes[each.type.name] += each.num_bytes
    return sizes


def _placed(
    config: ModelConfig, files: WeightFiles, description: Description, report: Progress
) -> Iterator[tuple[str, TensorPlace, torch.Tensor]]:
    """Every tensor once, with its place and layout in the file. Raises ModelLoadError for a missing, misshapen or
    unknown one."""
    names, seen = CheckpointNames.of(config), set()
    for source, tensor in checkpoint_tensors(files, config, report):
        own = names.find(source, description.places, (), tensor)
        if own is None:
            continue
        place, where = description.places[own], f"{files.current}: tensor {source!r}"
        shape = description.shapes[place.name]
        shape = shape if place.expert is None else shape[1:]
        if own in seen:
            raise ModelLoadError(f"{where} occurs twice")
        is_gate = len(shape) == 1 and tuple(tensor.shape) == (1, *shape)  # GGUF stores its one row as a vector
        if tuple(tensor.shape) != shape and not is_gate:
            raise ModelLoadError(f"{where} is {list(tensor.shape)}, not {list(shape)}")
        if not tensor.is_floating_point():
            raise ModelLoadError(f"{where} is not floating point: the checkpoint is quantised already")
        seen.add(own)
        whole = tensor.read() if isinstance(tensor, FileTensor) else tensor
        yield source, place, _as_file_has(whole.reshape(shape), place.name, config, description)
    if missing := description.places.keys() - seen:
        raise ModelLoadError(f"{config.path}: tensor {min(missing)!r} is missing")


def _as_file_has(tensor: torch.Tensor, name: str, config: ModelConfig, description: Description) -> torch.Tensor:
    """Tensor in the file's layout: rotated pairs interleaved and norms offset, if the architecture asks for it."""
    names, own = description.names, name.split(".")[-2]
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(own)
    if names.interleaved and heads is not None:
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, -1)
        return halves.transpose(1, 2).reshape(tensor.shape)
    return tensor.float() + names.norm_offset if own.endswith("_norm") else tensor
