"""The weight files of a model directory, streamed tensor by tensor."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quire.config.hf_json import read_json
from quire.errors import ModelLoadError
from quire.models.gguf.weights import GGUFWeights
from quire.utils.gguf import SUFFIX as GGUF_SUFFIX
from quire.utils.gguf import find_gguf

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

Tensors = Iterator[tuple[str, torch.Tensor]]


class WeightFiles:
    """Files of one format. `expected` names the tensors that an index promises for each file."""

    def __init__(self, directory: Path, expected: dict[Path, set[str]]) -> None:
        self.directory = directory
        self.current: Path | None = None
        """The file that the last streamed tensor came from; None once all are through."""
        self._expected = expected

    @property
    def paths(self) -> list[Path]:
        """The files, in the order of reading."""
        return list(self._expected)

    def stream(self, report: Progress) -> Tensors:
        """All tensors of all files. Raises ModelLoadError naming the file (and tensor) that cannot be read."""
        for path in self._expected:
            if not path.is_file():
                raise ModelLoadError(f"{path} is missing: the index of the checkpoint names it")
        sizes = {path: path.stat().st_size for path in self._expected}
        done, total = 0, sum(sizes.values())
        for path, expected in self._expected.items():
            self.current = path
            start, seen = done, set()
            read = _read_safetensors if path.suffix == ".safetensors" else _read_torch
            for name, tensor in read(path):
                seen.add(name)
                yield name, tensor
                done += tensor.nbytes
                report(min(done, total), total)
            if expected - seen:
                raise ModelLoadError(f"tensor {min(expected - seen)!r} is missing: the index places it in this file")
            done = start + sizes[path]
        self.current = None
        report(total, total)


def find_weights(directory: Path, load_format: str) -> WeightFiles | GGUFWeights:
    """The weight files of a directory: safetensors before .bin before GGUF, sharded before single ("auto"), or one
    kind alone. A GGUF file may stand in the directory's place. Raises ModelLoadError when there are none."""
    if directory.is_file():
        if load_format not in ("auto", "gguf"):
            raise ModelLoadError(f"{directory} is a GGUF file, which load_format={load_format!r} does not read")
        return GGUFWeights(directory)
    tried = []
    if load_format in ("auto", "safetensors"):
        tried += ["model.safetensors.index.json", "model.safetensors", "*.safetensors"]
    if load_format in ("auto", "pt"):
        tried += ["pytorch_model.bin.index.json", "pytorch_model.bin", "*.bin"]
    for pattern in tried:
        found = sorted(directory.glob(pattern))
        if found:
            if pattern.endswith(".index.json"):
                return WeightFiles(directory, _read_index(found[0]))
            return WeightFiles(directory, {path: set() for path in found})
    if load_format in ("auto", "gguf"):
        tried.append(f"*{GGUF_SUFFIX}")
        gguf = find_gguf(directory)
        if gguf is not None:
            return GGUFWeights(gguf)
    raise ModelLoadError(f"{directory} holds no weights (looked for {', '.join(tried)})")


def _read_index(index: Path) -> dict[Path, set[str]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index}: the key 'weight_map' must map tensor names to files")
    files: dict[Path, set[str]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelLoadError(f"{index}: tensor {tensor!r} lies in {file!r}, which is no file name")
        files.setdefault(index.parent / file, set()).add(tensor)
    return dict(sorted(files.items()))


def _read_safetensors(path: Path) -> Tensors:
    """The file is mapped anew for each tensor: what was read of a mapping stays resident as long as it lives, and a
    model would be in memory twice by the time its last tensor is packed."""
    try:
        with _open_safetensors(path) as file:
            names = list(file.keys())
        for name in names:
            with _open_safetensors(path) as file:
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is corrupt or truncated: {error}") from None


def _open_safetensors(path: Path) -> AbstractContextManager[Any]:
    opened: AbstractContextManager[Any] = safe_open(path, framework="pt")
    return opened


def _read_torch(path: Path) -> Tensors:
    """A `torch.save` file of tensors; anything else in it is refused, unread. Old files (no zip archive) cannot be
    mapped and are read whole."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError:
        raise ModelLoadError(f"{path} is corrupt, or holds more than tensors and is refused") from None
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        reason = str(error).splitlines() or [type(error).__name__]
        raise ModelLoadError(f"{path} is corrupt or truncated: {reason[0]}") from None
    if not isinstance(state, dict):
        raise ModelLoadError(f"{path} holds a {type(state).__name__}, not a table of tensors")
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise ModelLoadError(f"{path}: {name!r} is a {type(tensor).__name__}, not a tensor")
        yield name, tensor
