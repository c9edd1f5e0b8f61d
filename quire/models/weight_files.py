"""Streaming of a model directory's weight files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from quire.config.hf_json import read_json, shown
from quire.errors import ModelLoadError
from quire.models.gguf.weights import GGUFWeights
from quire.models.safetensors_files import BytesRead, read_safetensors
from quire.models.torch_files import read_torch
from quire.quantization.file_tensor import FileTensor
from quire.utils.gguf import SUFFIX as GGUF_SUFFIX
from quire.utils.gguf import find_gguf
from quire.utils.model_files import file_bytes

Progress = Callable[[int, int], None]
"""Callback for (bytes done, bytes in all)."""

LONGEST_NAME = 255

Tensors = Iterator[tuple[str, torch.Tensor | FileTensor]]


class WeightFiles:
    """Weight files of a checkpoint, each of one format. expected: tensor names that an index promises per file.
    prefixes: prefix of a file's tensor names."""

    def __init__(
        self, directory: Path, expected: dict[Path, set[str]], prefixes: Mapping[Path, str] | None = None
    ) -> None:
        self.directory = directory
        self.current: Path | None = None
        """File of the last streamed tensor; None at the end."""
        self.bytes_read = BytesRead()
        """Bytes read from safetensors files; others are mapped or read whole."""
        self.head_holds = ""
        """Embedding's name if these files store it as the tied head; "" otherwise."""
        self._expected = expected
        self._prefixes = prefixes or {}

    def with_folders(self, folders: Sequence[str], load_format: str) -> WeightFiles:
        """These files plus those of subfolders (pooling modules), whose tensors are named `<folder>.<name>`. Raises
        ModelLoadError for a folder without weights."""
        expected, prefixes = dict(self._expected), dict(self._prefixes)
        for folder in folders:
            found = find_weights(self.directory / folder, load_format)
            if isinstance(found, GGUFWeights):
                raise ModelLoadError(f"{self.directory / folder}: a GGUF file beside weights of another format")
            expected |= found._expected
            prefixes |= dict.fromkeys(found.paths, f"{folder}.")
        return WeightFiles(self.directory, expected, prefixes)

    @property
    def paths(self) -> list[Path]:
        return list(self._expected)

    def sizes(self) -> dict[Path, int]:
        """Bytes of each file, for progress and checks. Raises ModelLoadError for a missing or irregular file."""
        sizes = {}
        for path in self._expected:
            size = file_bytes(path)
            if size is None:
                raise ModelLoadError(f"{path} is missing: the index of the checkpoint names it")
            sizes[path] = size
        return sizes

    def stream(self, report: Progress) -> Tensors:
        """All tensors, lazy in safetensors files. Raises ModelLoadError naming an unreadable file and tensor."""
        sizes = self.sizes()
        done, total = 0, sum(sizes.values())
        for path, expected in self._expected.items():
            self.current = path
            start, seen = done, set()
            is_safetensors = path.suffix == ".safetensors"
            for name, tensor in read_safetensors(path, self.bytes_read) if is_safetensors else read_torch(path):
                seen.add(name)
                yield self._prefixes.get(path, "") + name, tensor
                done += tensor.nbytes
                report(min(done, total), total)
            if expected - seen:
                raise ModelLoadError(
                    f"tensor {shown(min(expected - seen))} is missing: the index places it in this file"
                )
            done = start + sizes[path]
        self.current = None
        report(total, total)


def whole_tensors(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Same tensors, each read into memory, for quantised checkpoints."""
    for name, tensor in tensors:
        yield name, tensor.read() if isinstance(tensor, FileTensor) else tensor


def find_weights(directory: Path, load_format: str) -> WeightFiles | GGUFWeights:
    """Weight files of a directory, or a GGUF file: "auto" prefers safetensors to .bin to GGUF, sharded to single files.
    Raises ModelLoadError if none."""
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
        if not isinstance(file, str) or Path(file).name != file or file == ".." or len(file) > LONGEST_NAME:
            raise ModelLoadError(f"{index}: tensor {shown(tensor)} lies in {shown(file)}, which is no file name")
        files.setdefault(index.parent / file, set()).add(tensor)
    return dict(sorted(files.items()))
