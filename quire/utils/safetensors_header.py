"""The header of a safetensors file: JSON that says what tensors there are. Read here, within limits, for whatever needs
it; the weights themselves are the library's to read."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from quire.errors import ModelLoadError
from quire.utils.model_files import file_bytes

MAX_HEADER_BYTES = 2**24
"""The library allows 100 MB, and takes some ten times that for what they say."""
MAX_TENSORS = 2**16
"""In one file."""
MAX_VALUES = 2**20
"""Commas: sixteen for a tensor. A parsed value takes some 100 bytes, however short it is written."""


def read_header(path: Path) -> bytes:
    """The JSON text of the header. Raises ModelLoadError for a file that is no regular file or cannot be read, and for
    a header that is larger than that of any model."""
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
