"""GGUF writer: the header first, then tensors' bytes in any order. The file has a temporary name until it is complete.
Imports neither torch nor numpy."""

from __future__ import annotations

import errno
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from quire.errors import UserError
from quire.utils.gguf import DEFAULT_ALIGNMENT, MAGIC, SUFFIX, BlockType

Value = bool | int | float | str | Sequence[int] | Sequence[float] | Sequence[str]
VERSION = 3
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64 = 4, 5, 6, 7, 8, 9, 10


@dataclass(frozen=True)
class PlannedTensor:
    """Tensor of a file to write. shape: outermost dimension first; whole blocks make up the last. number: type in the
    format."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    number: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.type.values * self.type.num_bytes


class GGUFWriter:
    """File being written. `partial` is its place until `finish`, named as a GGUF file, with a readable header."""

    def __init__(self, path: Path, metadata: Mapping[str, Value], tensors: Sequence[PlannedTensor]) -> None:
        """Write the header and reserve room for all tensors. Raises UserError."""
        self.path = path
        self.partial = path.with_name(f".{path.name}.part{SUFFIX}")
        self._missing = {tensor.name: tensor.num_bytes for tensor in tensors}
        head, self._starts = _header(metadata, tensors)
        size = max((start + tensor.num_bytes for start, tensor in zip(self._starts.values(), tensors, strict=True)),
                   default=len(head))  # fmt: skip
        try:
            self._file = self.partial.open("wb", buffering=0)
        except OSError as error:
            raise UserError(f"cannot write {str(path)!r}: {error.strerror}", param="output") from None
        try:
            _set_aside(self._file.fileno(), size)
            self._write(0, head)
        except BaseException:
            self._drop()
            raise

    def write(self, name: str, data: bytes | memoryview, start: int = 0) -> None:
        """Write a tensor's bytes, or a part from byte `start` on, each byte once. Raises UserError."""
        self._missing[name] -= len(data)
        assert self._missing[name] >= 0, f"{name} has been written already"
        self._write(self._starts[name] + start, data)

    def finish(self) -> None:
        """Give the file its final name. Raises UserError."""
        lacking = [name for name, count in self._missing.items() if count]
        assert not lacking, f"{lacking[0]} has not been written"
        try:
            os.fsync(self._file.fileno())
            self._file.close()
            self.partial.replace(self.path)
        except OSError as error:
            raise self._refused(error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: type[BaseException] | None, _e: BaseException | None, _tb: TracebackType | None) -> None:
        self._drop()

    def _write(self, place: int, data: bytes | memoryview) -> None:
        try:
            self._file.seek(place)
            left = memoryview(data)
            while left:  # the system takes 2 GB at once
                left = left[self._file.write(left) :]
        except OSError as error:
            raise self._refused(error) from None

    def _refused(self, error: OSError) -> UserError:
        return UserError(f"cannot write {str(self.path)!r}: {error.strerror}", param="output")

    def _drop(self) -> None:
        self._file.close()
        self.partial.unlink(missing_ok=True)


def _set_aside(file: int, size: int) -> None:
    try:
        os.posix_fallocate(file, 0, size)
    except (OSError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EFBIG):
            raise UserError(f"the disk has no room for {size} bytes", param="output") from None
        os.truncate(file, size)


def _header(metadata: Mapping[str, Value], tensors: Sequence[PlannedTensor]) -> tuple[bytes, dict[str, int]]:
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    parts += [_string(key) + _value(key, value) for key, value in metadata.items()]
    offsets: list[int] = []
    end = 0
    for tensor in tensors:
        parts.append(_string(tensor.name) + struct.pack("<I", len(tensor.shape)))
        parts.append(struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape)))
        parts.append(struct.pack("<IQ", tensor.number, end))
        offsets.append(end)
        end = _aligned(end + tensor.num_bytes)
    head = b"".join(parts)
    head += bytes(_aligned(len(head)) - len(head))
    return head, {tensor.name: len(head) + offset for tensor, offset in zip(tensors, offsets, strict=True)}


def _aligned(size: int) -> int:
    return -(-size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(key: str, value: Value) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        kind, code = (_UINT32, "I") if value < 2**32 else (_UINT64, "Q")
        return struct.pack(f"<I{code}", kind, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    assert value, f"{key}: an empty list has no type"
    if isinstance(value[0], str):
        kind, items = _STRING, b"".join(_string(str(each)) for each in value)
    elif isinstance(value[0], float):
        kind, items = _FLOAT32, struct.pack(f"<{len(value)}f", *value)
    else:
        kind, items = _INT32, struct.pack(f"<{len(value)}i", *value)
    return struct.pack("<IIQ", _ARRAY, kind, len(value)) + items
