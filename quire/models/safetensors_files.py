"""Safetensors files, read tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quire.errors import ModelLoadError
from quire.models.tensor_checks import check_name, checked
from quire.utils.safetensors_header import read_header

MAPPED_BYTES = 2**24
"""Bytes read before a file is mapped anew. The pages read stay resident as long as their mapping, so with one mapping a
model would be in memory twice when its last tensor is packed."""


def read_safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Raises ModelLoadError, naming the file, for one that cannot be read."""
    read_header(path)  # its limits: the library reads it again
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


def _open(path: Path) -> AbstractContextManager[Any]:
    opened: AbstractContextManager[Any] = _guarded(path, lambda: safe_open(path, framework="pt"))
    return opened


def _guarded(path: Path, call: Any, *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        reason = str(error).splitlines() or [type(error).__name__]
        raise ModelLoadError(f"{path} is corrupt or truncated: {reason[0]}") from None
