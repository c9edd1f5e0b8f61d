"""Safetensors files, read tensor by tensor."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quire.errors import ModelLoadError
from quire.models.tensor_checks import check_name, checked
from quire.utils.model_files import file_bytes

MAX_HEADER_BYTES = 2**24
"""The library allows 100 MB, and takes some ten times that for what they say."""
MAX_TENSORS = 2**16
"""The most tensors in one file."""
MAPPED_BYTES = 2**24
"""Bytes read before a file is mapped anew. The pages read stay resident as long as their mapping, so with one mapping a
model would be in memory twice when its last tensor is packed."""


def read_safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Raises ModelLoadError, naming the file, for one that cannot be read."""
    check_header(path)
    names: list[str] = []
    position = 0
    while position == 0 or position < len(names):
        with _open(path) as file:
            names = names or [check_name(name) for name in _guarded(path, file.keys)]
            if not names:
                return
            mapped = 0
            while position < len(names) and mapped < MAPPED_BYTES:
                name = names[position]
                tensor = _guarded(path, file.get_tensor, name)
                mapped += tensor.nbytes
                position += 1
                yield name, checked(name, tensor)
                del tensor


def check_header(path: Path) -> None:
    """Raises ModelLoadError for a header that is larger than that of any model."""
    size = file_bytes(path) or 0
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= size:
            raise ModelLoadError(f"{path} is corrupt or truncated: a header of {length} bytes in a file of {size}")
        if length > MAX_HEADER_BYTES:
            raise ModelLoadError(f"{path} has a header of {length} bytes, which may have {MAX_HEADER_BYTES}")
        if file.read(length).count(b"{") > MAX_TENSORS:
            raise ModelLoadError(f"{path} lists more than {MAX_TENSORS} tensors")


def _open(path: Path) -> AbstractContextManager[Any]:
    opened: AbstractContextManager[Any] = _guarded(path, lambda: safe_open(path, framework="pt"))
    return opened


def _guarded(path: Path, call: Any, *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        reason = str(error).splitlines() or [type(error).__name__]
        raise ModelLoadError(f"{path} is corrupt or truncated: {reason[0]}") from None
