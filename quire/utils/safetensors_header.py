"""Bounded reading of a safetensors file's header, JSON that lists its tensors."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from quire.errors import ModelLoadError
from quire.utils.model_files import file_bytes

MAX_HEADER_BYTES = 2**24
"""Limit of a header in bytes. The library allows 100 MB, and needs some ten times that for the content."""
MAX_TENSORS = 2**16
MAX_VALUES = 2**20
"""Limit of commas, sixteen per tensor. A parsed value takes some 100 bytes, however short its text."""


def read_header(path: Path) -> bytes:
    """JSON text of the header. Raises ModelLoadError for a file that is not regular or readable, and for a larger
    header than any model's."""
    size = file_bytes(path)
    if size is None:
        raise ModelLoadError(f"cannot read {path}: {os.strerror(2)}")
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= size:
                raise ModelLoadError(f"{path} is corrupt or truncated: a header of {length} bytes in a file of {size}")
            if length > MAX_HEADER_BYTES:
                raise ModelLoadError(f"{path} has a header of {length} bytes, which may have {MAX_HEADER_BYTES}")
            text = file.read(length)
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from None
    if len(text) < length:
        raise ModelLoadError(f"{path} is corrupt or truncated: its header of {length} bytes is cut short")
    if text.count(b"{") > MAX_TENSORS:
        raise ModelLoadError(f"{path} lists more than {MAX_TENSORS} tensors")
    if text.count(b",") > MAX_VALUES:
        raise ModelLoadError(f"{path} has a header of more than {MAX_VALUES} values")
    return text
