"""Whether a checkpoint brings a head for drafts: its tensors say so, since tools that save models often leave it out
and keep what config.json says of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from quire.config.hf_json import read_json
from quire.errors import ModelLoadError
from quire.utils.safetensors_header import read_header

INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
MAX_DRAFT_LAYERS = 16


def count_draft_layers(directory: Path, prefix: str) -> int:
    """Layers of the head whose tensors' names begin with `prefix`, by an index or the headers of safetensors files; 0
    where neither names such a tensor. Reads no weights. Raises ModelLoadError for files that cannot be read, and for
    more layers than any model has."""
    layer = re.compile(rf"{re.escape(prefix)}layers\.(\d{{1,9}})\.")
    num_layers = 0
    for name in _tensor_names(directory):
        if name.startswith(prefix):
            found = layer.match(name)
            num_layers = max(num_layers, 1 if found is None else int(found[1]) + 1)
    if num_layers > MAX_DRAFT_LAYERS:
        raise ModelLoadError(f"{directory}: a head for drafts of {num_layers} layers; most: {MAX_DRAFT_LAYERS}")
    return num_layers


def _tensor_names(directory: Path) -> Iterable[str]:
    for index in INDEX_FILES:
        if (directory / index).is_file():
            weight_map = read_json(directory / index).get("weight_map")
            return weight_map if isinstance(weight_map, dict) else ()  # what else it is, loading says
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    return [name for file in files for name in _header_names(file)]


def _header_names(file: Path) -> Iterable[str]:
    try:
        header = json.loads(read_header(file))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} is not a valid safetensors file: {str(error)[:200]}") from None
    return header if isinstance(header, dict) else ()
