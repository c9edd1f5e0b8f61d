"""GGUF reader: header, metadata and table of tensors, without torch or numpy. Files may be hostile: every fault is a
ModelLoadError, and the limits below bound the work."""

from __future__ import annotations

import math
import mmap
import re
import struct
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from quire.errors import ModelLoadError

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**20
MAX_HEADER_BYTES = 2**28
"""Limit of header, metadata and tensor table: some ten times those of the largest vocabularies."""
MAX_STRINGS = 2**22
"""Limit of all string arrays' elements."""
MAX_KEYS = 2**16
MAX_TENSORS = 2**16
MAX_KEY_BYTES = 2**16 - 1
MAX_NAME_BYTES = 256
MAX_DIMENSIONS = 4
MAX_PARTS = 1000
"""Limit of a model's files; each is an open mapping."""

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
"""Value type of fixed size -> struct format."""
_LEAST_PAIR_BYTES = 8 + 4 + 1
_LEAST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
_FIRST_PART = re.compile(rf"-00001-of-(\d{{5}}){re.escape(SUFFIX)}$")
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


@dataclass(frozen=True, slots=True)
class BlockType:
    """Storage of numbers: blocks of `values` consecutive ones of a row, in `num_bytes` bytes."""

    name: str
    values: int
    num_bytes: int


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
}
"""Number in the file format -> type."""
OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""Unsupported types, for the error message."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """shape: outermost dimension first, as in torch (the file lists the innermost first). start, num_bytes: place of
    its data in its file. part: file of a split model."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    start: int
    num_bytes: int
    part: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class _Array:
    """Array not decoded: `count` elements of the type from `start` on."""

    type: int
    count: int
    start: int

    def __repr__(self) -> str:
        return f"a list of {self.count}"


class GGUFFile:
    """Open GGUF file, or the files of a split model. metadata: values of the first file by key; arrays are
    placeholders, read by `strings` and `numbers`. tensors: by name, in the files' order. `release` drops a copied
    tensor's pages. A context closes the file once no view is held."""

    def __init__(self, path: Path) -> None:
        """Open and check the header of each file. Raises ModelLoadError with the file's name."""
        self.path = path
        self.paths = [path]
        self._maps = [_map_file(path)]
        try:
            reader = _HeaderReader(self._maps[0], path)
            self.metadata = reader.metadata()
            self.tensors = reader.tensors(self.metadata)
            num_parts = self._split_number(self.metadata, "count")
            if num_parts > 1:
                self._open_parts(num_parts)
        except BaseException:
            self.close()
            raise

    def _open_parts(self, num_parts: int) -> None:
        if num_parts > MAX_PARTS:
            raise self.error(f"its model is split over {num_parts} files, and {MAX_PARTS} are supported")
        if (number := self._split_number(self.metadata, "no")) != 0:
            raise self.error(f"it is part {number + 1} of a split model: name the first of its files")
        names = parts_of(self.path)
        if len(names) != num_parts:
            raise self.error(
                f"it is the first of {num_parts} files, and its name does not end in -00001-of-{num_parts:05}"
            )
        for part, path in enumerate(names[1:], 1):
            mapped = _map_file(path)
            self._maps.append(mapped)
            self.paths.append(path)
            reader = _HeaderReader(mapped, path)
            metadata = reader.metadata()
            found = self._split_number(metadata, "no"), self._split_number(metadata, "count")
            if found != (part, num_parts):
                raise ModelLoadError(f"{path} says that it is part {found[0] + 1} of {found[1]}")
            for name, entry in reader.tensors(metadata).items():
                if name in self.tensors:
                    raise ModelLoadError(f"{path}: tensor {name!r} is in another part too")
                self.tensors[name] = replace(entry, part=part)
        expected = self._split_number(self.metadata, "tensors.count", len(self.tensors))
        if len(self.tensors) != expected:
            raise self.error(f"its model has {expected} tensors, and its files hold {len(self.tensors)}")

    def _split_number(self, metadata: dict[str, Any], name: str, default: int = 0) -> int:
        value = metadata.get(f"split.{name}", default)
        if type(value) is not int or value < 0:
            raise self.error(f"split.{name} must be a count, not {value!r}")
        return value

    def error(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {message}")

    def strings(self, key: str) -> list[str] | None:
        found = self._strings(key)
        try:
            return None if found is None else [text.decode() for text in found]
        except UnicodeDecodeError:
            raise self.error(f"{key} holds a string that is not valid UTF-8") from None

    def places(self, key: str, names: Collection[str]) -> dict[str, int]:
        """Indices of those of `names` that an array of strings holds, the last one of each; empty when the key is
        absent."""
        found = self._strings(key) or []
        known = {name.encode() for name in names}.intersection(found)
        return {text.decode(): index for index, text in enumerate(found) if text in known} if known else {}

    def numbers(self, key: str) -> list[int | float] | None:
        array = self._array(key)
        if array is None:
            return None
        if array.type not in _SCALARS:
            raise self.error(f"{key} must be a list of numbers")
        return list(struct.unpack_from(f"<{array.count}{_SCALARS[array.type]}", self._maps[0], array.start))

    def data(self, entry: TensorEntry) -> memoryview:
        """Tensor's bytes in the mapping, which must not be written."""
        return memoryview(self._maps[entry.part])[entry.start : entry.start + entry.num_bytes]

    def release(self, entry: TensorEntry) -> None:
        """Drop the memory of a tensor's pages. Views stay valid: the pages are read again."""
        first = -(-entry.start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (entry.start + entry.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        mapped = self._maps[entry.part]
        if last > first and hasattr(mmap, "MADV_DONTNEED") and not mapped.closed:
            mapped.madvise(mmap.MADV_DONTNEED, first, last - first)

    def close(self) -> None:
        """Close the mappings; those with views close with the last view."""
        for mapped in self._maps:
            with suppress(BufferError):
                mapped.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: type[BaseException] | None, _e: BaseException | None, _tb: TracebackType | None) -> None:
        self.close()

    def _strings(self, key: str) -> list[bytes] | None:
        array = self._array(key)
        if array is None:
            return None
        if array.type != _STRING:
            raise self.error(f"{key} must be a list of strings")
        found, position, data, number = [], array.start, self._maps[0], _U64.unpack_from
        for _ in range(array.count):
            (length,) = number(data, position)
            position += _U64.size + length
            found.append(data[position - length : position])
        return found

    def _array(self, key: str) -> _Array | None:
        value = self.metadata.get(key)
        if value is None or isinstance(value, _Array):
            return value
        raise self.error(f"{key} must be a list, not {type(value).__name__}")


def is_mmproj(path: Path) -> bool:
    """True for a name that llama.cpp gives a vision tower's file."""
    return "mmproj" in path.name.lower()


def parts_of(path: Path) -> list[Path]:
    """Files of the model whose first (or only) file is `path`, by their names."""
    numbered = _FIRST_PART.search(path.name)
    if numbered is None:
        return [path]
    count, stem = int(numbered[1]), path.name[: numbered.start()]
    return [path.with_name(f"{stem}-{number:05}-of-{count:05}{SUFFIX}") for number in range(1, count + 1)]


def find_gguf(directory: Path) -> Path | None:
    """GGUF file of a directory, of a split model the first; not a vision tower's; None: no file. Raises ModelLoadError
    for several models."""
    found = sorted(path for path in directory.glob(f"*{SUFFIX}") if path.is_file() and not is_mmproj(path))
    if len(found) > 1 and found != parts_of(found[0]):
        raise ModelLoadError(f"{directory} holds {len(found)} GGUF files: name the one to load, such as {found[0]}")
    return found[0] if found else None


class _HeaderReader:
    """Reads from the first byte to the end of the tensor table. `position` never passes `limit`."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._size = len(data)
        self._limit = min(self._size, MAX_HEADER_BYTES)
        self._position = 0
        self._num_strings = 0
        if data[: len(MAGIC)] != MAGIC:
            raise ModelLoadError(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()}")
        self._position = len(MAGIC)
        version = self._number(_U32)
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            why = "it is big-endian" if swapped in VERSIONS else f"its version is {version}"
            raise ModelLoadError(f"{path}: {why}; little-endian files of version 2 and 3 are supported")
        self._num_tensors = self._count("tensors", MAX_TENSORS, _LEAST_TENSOR_BYTES)
        self._num_pairs = self._count("metadata keys", MAX_KEYS, _LEAST_PAIR_BYTES)

    def metadata(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for _ in range(self._num_pairs):
            key = self._text("a metadata key", MAX_KEY_BYTES)
            if key in values:
                raise self._error(f"metadata key {key!r} occurs twice")
            values[key] = self._value(key, self._number(_U32))
        return values

    def tensors(self, values: dict[str, Any]) -> dict[str, TensorEntry]:
        """Table, with places in the file. Raises ModelLoadError for data outside the file, off the alignment or
        overlapping."""
        alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._error(f"general.alignment must be a power of two from 8 to {MAX_ALIGNMENT}, not {alignment!r}")
        entries: dict[str, TensorEntry] = {}
        for _ in range(self._num_tensors):
            entry = self._tensor(alignment)
            if entry.name in entries:
                raise self._error(f"tensor {entry.name!r} occurs twice")
            entries[entry.name] = entry
        data_start = -(-self._position // alignment) * alignment
        placed = {
            name: TensorEntry(name, entry.shape, entry.type, data_start + entry.start, entry.num_bytes)
            for name, entry in entries.items()
        }
        end = data_start
        for entry in sorted(placed.values(), key=lambda entry: entry.start):
            if entry.start < end:
                raise self._error(f"the data of tensor {entry.name!r} overlaps another tensor's")
            end = entry.start + entry.num_bytes
            if end > self._size:
                raise self._error(f"the data of tensor {entry.name!r} ends at byte {end} of {self._size}: truncated?")
        return placed

    def _tensor(self, alignment: int) -> TensorEntry:
        """One entry, with its start relative to the first tensor's."""
        name = self._text("a tensor's name", MAX_NAME_BYTES)
        num_dimensions = self._number(_U32)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._error(f"tensor {name!r} has {num_dimensions} dimensions")
        sizes = [self._number(_U64) for _ in range(num_dimensions)]
        number, start = self._number(_U32), self._number(_U64)
        block = BLOCK_TYPES.get(number)
        if block is None:
            what = OTHER_TYPES.get(number, f"the unknown type {number}")
            known = ", ".join(sorted(known.name for known in BLOCK_TYPES.values()))
            raise self._error(f"tensor {name!r} is stored as {what}, which is not supported (known: {known})")
        num_values = math.prod(sizes)
        if num_values < 1 or sizes[0] % block.values:
            raise self._error(f"tensor {name!r} of {block.name} cannot have the shape {sizes[::-1]}")
        if start % alignment:
            raise self._error(f"tensor {name!r} lies at {start}, which is no multiple of the alignment {alignment}")
        return TensorEntry(name, tuple(sizes[::-1]), block, start, num_values // block.values * block.num_bytes)

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text(key, self._limit)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self._error(f"{key} is of the unknown type {kind}")
        value = self._number(struct.Struct("<" + _SCALARS[kind]))
        if kind != _BOOL:
            return value
        if value > 1:
            raise self._error(f"{key} must be true (1) or false (0), not {value}")
        return bool(value)

    def _array(self, key: str) -> _Array:
        kind, count = self._number(_U32), self._number(_U64)
        array = _Array(kind, count, self._position)
        if kind == _STRING:
            self._skip_strings(key, count)
        elif kind in _SCALARS:
            self._skip(count * struct.calcsize("<" + _SCALARS[kind]), key)
        else:
            raise self._error(f"{key} is a list of the type {kind}, which is not supported")
        return array

    def _skip_strings(self, key: str, count: int) -> None:
        self._num_strings += count
        if self._num_strings > MAX_STRINGS:
            raise self._error(f"{key} has {count} strings; there may be {MAX_STRINGS} in all")
        position, data, number, more = self._position, self._data, _U64.unpack_from, _U64.size
        try:
            for _ in range(count):
                (length,) = number(data, position)
                position += length + more
        except (struct.error, OverflowError):  # no number is there
            raise self._past_the_end(key) from None
        self._skip(position - self._position, key)

    def _text(self, what: str, longest: int) -> str:
        length = self._number(_U64)
        if length > longest:
            raise self._error(f"{what} has {length} bytes, more than {longest}")
        start = self._position
        self._skip(length, what)
        try:
            return self._data[start : self._position].decode()
        except UnicodeDecodeError:
            raise self._error(f"{what} is not valid UTF-8") from None

    def _count(self, what: str, most: int, least_bytes: int) -> int:
        count: int = self._number(_U64)
        if count > most or count * least_bytes > self._limit - self._position:
            raise self._error(f"it claims to have {count} {what}")
        return count

    def _number(self, kind: struct.Struct) -> Any:
        start = self._position
        self._skip(kind.size, "the header")
        return kind.unpack_from(self._data, start)[0]

    def _skip(self, num_bytes: int, what: str) -> None:
        if num_bytes > self._limit - self._position:
            raise self._past_the_end(what)
        self._position += num_bytes

    def _past_the_end(self, what: str) -> ModelLoadError:
        if self._limit < self._size:
            return self._error(f"{what} reaches beyond the {self._limit} bytes that a header may have")
        return self._error(f"{what} reaches beyond the end of the file: truncated?")

    def _error(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path} is not a valid GGUF file: {message}")


def _map_file(path: Path) -> mmap.mmap:
    if not path.is_file():
        raise ModelLoadError(f"{path} is not a file")
    try:
        with path.open("rb") as file:
            if path.stat().st_size < len(MAGIC):
                raise ModelLoadError(f"{path} is not a GGUF file: it has {path.stat().st_size} bytes")
            # Private and writable: torch warns of tensors over read-only memory, and a write to them would end the
            # process. Nothing is written, so no memory is reserved for it.
            return mmap.mmap(
                file.fileno(), 0, flags=mmap.MAP_PRIVATE | _NO_RESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from None
