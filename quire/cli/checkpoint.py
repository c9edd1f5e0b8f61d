from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.config.hf_json import shown
from quire.errors import ModelLoadError
from quire.utils.gguf import GGUFFile, find_gguf
from quire.utils.safetensors_header import read_header

MAX_DIMENSIONS = 16
DTYPE_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "BF16": 16, "F16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "I8": 8, "U8": 8, "BOOL": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """Model's sizes on disk, for `quire plan`. format: "safetensors" or "GGUF". elements, bytes: totals by stored dtype
    (the format's name)."""

    format: str
    num_files: int
    elements: Mapping[str, int]
    bytes: Mapping[str, int]


def read_checkpoint(path: Path) -> Checkpoint | None:
    """Sum up the headers of a directory's safetensors files, or else of its GGUF file (also given directly); None
    without such files. Reads no weights."""
    files = sorted(path.glob("*.safetensors"))
    gguf = path if path.is_file() else None if files else find_gguf(path)
    if gguf is not None:
        return _gguf_checkpoint(gguf)
    elements: Counter[str] = Counter()
    for file in files:
        for dtype, count in _header(file):
            elements[dtype] += count
    sizes = {dtype: count * DTYPE_BITS[dtype] // 8 for dtype, count in elements.items()}
    return Checkpoint("safetensors", len(files), dict(elements), sizes) if files else None


def _gguf_checkpoint(path: Path) -> Checkpoint:
    elements: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    with GGUFFile(path) as file:
        num_files = len(file.paths)
        for entry in file.tensors.values():
            elements[entry.type.name] += math.prod(entry.shape)
            sizes[entry.type.name] += entry.num_bytes
    return Checkpoint("GGUF", num_files, dict(elements), dict(sizes))


def _header(file: Path) -> list[tuple[str, int]]:
    text = read_header(file)
    try:
        tensors = [entry for name, entry in json.loads(text).items() if name != "__metadata__"]
        found = [(str(entry["dtype"]), _num_elements(entry["shape"])) for entry in tensors]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"{file} is not a valid safetensors file: {str(error)[:200]}") from None
    for dtype, _ in found:
        if dtype not in DTYPE_BITS:
            raise ModelLoadError(f"{file} stores tensors of an unknown dtype {shown(dtype)}")
    return found


def _num_elements(shape: list[int]) -> int:
    if len(shape) > MAX_DIMENSIONS or not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        raise ValueError("a tensor's shape is not a short list of sizes")
    return math.prod(shape)
