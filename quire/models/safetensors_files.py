"""Reading of safetensors files, tensor by tensor and in parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quire.errors import ModelLoadError
from quire.models.tensor_checks import check_name, checked, named_dtype
from quire.quantization.file_tensor import FileTensor
from quire.utils.safetensors_header import read_header

MAPPED_BYTES = 2**24
"""Bytes read before a file is mapped again. Pages stay resident with their mapping: a single one would hold the model
in memory twice."""


class BytesRead:
    """Counter of the bytes read from files, for loading progress."""

    def __init__(self) -> None:
        self.total = 0


def read_safetensors(path: Path, count: BytesRead) -> Iterator[tuple[str, FileTensor]]:
    """Tensors of a file; each is readable until the next is requested. Raises ModelLoadError naming an unreadable
    file."""
    read_header(path)  # checks limits; the library reads the header again
    names: list[str] = []
    position = 0
    while position == 0 or position < len(names):
        with _open(path) as file:
            names = names or [check_name(name) for name in _guarded(path, file.keys)]
            if not names:
                return
            mapped = count.total + MAPPED_BYTES
            while position < len(names) and count.total < mapped:
                name = names[position]
                position += 1
                yield name, _file_tensor(path, file, name, count)


def _file_tensor(path: Path, file: Any, name: str, count: BytesRead) -> FileTensor:
    stored = _guarded(path, file.get_slice, name)
    shape = tuple(_guarded(path, stored.get_shape))

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        count.total += tensor.nbytes
        return checked(name, tensor)

    def read_slice(dim: int, start: int, length: int) -> torch.Tensor:
        window = (*[slice(None)] * dim, slice(start, start + length))
        return counted(_guarded(path, stored.__getitem__, window))

    dtype = named_dtype(name, _guarded(path, stored.get_dtype))
    return FileTensor(shape, dtype, lambda: counted(_guarded(path, file.get_tensor, name)), read_slice)


def _open(path: Path) -> AbstractContextManager[Any]:
    opened: AbstractContextManager[Any] = _guarded(path, lambda: safe_open(path, framework="pt"))
    return opened


def _guarded(path: Path, call: Any, *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        reason = str(error).splitlines() or [type(error).__name__]
        raise ModelLoadError(f"{path} is corrupt or truncated: {reason[0]}") from None
