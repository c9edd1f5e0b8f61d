"""Importance matrices of llama.cpp's tools: per matrix, the mean square of each input column over some text. Files are
GGUF (tensors `NAME.in_sum2` and `NAME.counts`) or an older binary format."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from quire.config.gguf_export import TensorPlace
from quire.errors import ModelLoadError
from quire.utils.gguf import MAGIC, GGUFFile
from quire.utils.model_files import read_model_file

Importance = dict[str, torch.Tensor]
"""Importance by a matrix's name in the file: [columns] float32, >= 0; stacked matrices are concatenated."""
MAX_BYTES = 2**30
MAX_ENTRIES = 2**16
_SUMS, _COUNTS = ".in_sum2", ".counts"


def read_importance(path: Path) -> Importance:
    """Read an importance matrix for `quire quantize`. Raises ModelLoadError naming it for another format, a broken
    file, or invalid numbers."""
    try:
        with path.open("rb") as file:
            is_gguf = file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from None
    found = _read_gguf(path) if is_gguf else _read_older(path)
    for name, sums in found.items():
        if not bool((torch.isfinite(sums) & (sums >= 0)).all()):
            raise ModelLoadError(f"{path}: the importance of {name!r} is negative, infinite or no number")
    return found


def _read_gguf(path: Path) -> Importance:
    found: Importance = {}
    with GGUFFile(path) as file:
        for name, entry in file.tensors.items():
            if not name.endswith(_SUMS):
                continue
            own = name.removesuffix(_SUMS)
            counts = file.tensors.get(own + _COUNTS)
            if counts is None or {entry.type.name, counts.type.name} != {"F32"}:
                raise file.error(f"it is no importance matrix: {own!r} has no sums and counts in F32")
            sums = np.frombuffer(file.data(entry), dtype="<f4").reshape(-1, entry.shape[-1])
            times = np.frombuffer(file.data(counts), dtype="<f4").reshape(-1, 1)
            if len(times) != len(sums):
                raise file.error(f"{own!r} has {len(sums)} rows of sums and {len(times)} counts")
            means = np.where(times > 0, sums / np.maximum(times, 1), 1)
            found[own] = torch.from_numpy(means.astype(np.float32).reshape(-1))
    if not found:
        raise ModelLoadError(f"{path} is no importance matrix: it has no tensor *{_SUMS}")
    return found


def _read_older(path: Path) -> Importance:
    content = read_model_file(path, MAX_BYTES)
    place = 0

    def number() -> int:
        nonlocal place
        (value,) = struct.unpack_from("<i", content, place)
        place += 4
        return int(value)

    def piece(length: int) -> bytes:
        nonlocal place
        if length < 0 or place + length > len(content):
            raise ValueError
        place += length
        return content[place - length : place]

    found: Importance = {}
    try:
        count = number()
        if not 1 <= count <= MAX_ENTRIES:
            raise ValueError
        for _ in range(count):
            name = piece(number()).decode()
            calls, columns = number(), number()
            sums = np.frombuffer(piece(4 * columns), dtype="<f4")
            found[name] = torch.from_numpy(sums / np.float32(max(calls, 1)))
    except (ValueError, struct.error):
        raise ModelLoadError(f"{path} is no importance matrix, or a broken one") from None
    return found


def by_tensor(means: Mapping[str, torch.Tensor], places: Mapping[str, TensorPlace]) -> Importance:
    """Rename measured importance to the GGUF file's tensor names. means: by Hugging Face's. A matrix without data in a
    stack gets zeros."""
    known = {places[source].name: means[source] for source in means}
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in known}
    for source, place in places.items():
        if place.name in known:
            parts[place.name].append(means.get(source, torch.zeros_like(known[place.name])))
    return {name: torch.cat(each) for name, each in parts.items()}


def importance_of(importance: Importance, place: TensorPlace, columns: int, where: str) -> torch.Tensor | None:
    """Importance of a matrix, [columns]; None if unknown. Raises ModelLoadError for another number of columns."""
    found = importance.get(place.name)
    if found is None:
        return None
    if place.expert is not None:
        found = found[place.expert * columns : (place.expert + 1) * columns]
    if len(found) != columns:
        raise ModelLoadError(f"{where}: {place.name!r} has {len(found)} columns, and the model's matrix {columns}")
    return found if bool(found.any()) else None
