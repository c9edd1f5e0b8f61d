"""One block of KV cache as a file: a header that identifies it, then its pages.

    offset  bytes
    0       8      magic: the version of the format
    8       32     namespace: hash of what computed the content, and its layout (cache_identity.py)
    40      32     the block's hash (quire/kv_cache/block_hash.py)
    72      4      KV group
    76      4      number of pages
    80      8      bytes of a page
    88      4      CRC-32 of the pages
    92      4      CRC-32 of the 92 bytes before
    96      -      the pages, one after the other

Numbers are little-endian. Readers compare the header with the requested block. Checksums find no forgeries
(docs/decisions/0028-kv-connector.md).
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

Buffer: TypeAlias = bytearray | memoryview
"""Writable, contiguous bytes."""

MAGIC = b"QUIREKV1"
_KEYS = struct.Struct("<8s32s32sIIQI")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _KEYS.size + _CHECK.size


class BlockFileError(Exception):
    """The file does not hold the requested block; the message says why."""


@dataclass(frozen=True)
class BlockFileLayout:
    """Constants of one engine's block files. namespace: 32 bytes, equal for engines that may share blocks. page_bytes:
    bytes of each of the `num_pages` pages."""

    namespace: bytes
    num_pages: int
    page_bytes: int

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.num_pages * self.page_bytes

    def header(self, group: int, block_hash: bytes, checksum: int) -> bytes:
        keys = _KEYS.pack(MAGIC, self.namespace, block_hash, group, self.num_pages, self.page_bytes, checksum)
        return keys + _CHECK.pack(zlib.crc32(keys))


def write_block(path: Path, layout: BlockFileLayout, group: int, block_hash: bytes, pages: Sequence[Buffer]) -> None:
    """Write a block to `path`, which must not exist. Raises OSError, with the partial file removed."""
    header = layout.header(group, block_hash, _checksum(pages))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            written = os.writev(descriptor, [header, *pages])
        finally:
            os.close(descriptor)
        if written != layout.file_bytes:
            raise OSError(f"{written} of {layout.file_bytes} bytes were written")
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def read_block(path: Path, layout: BlockFileLayout, group: int, block_hash: bytes, pages: Sequence[Buffer]) -> None:
    """Read a block into `pages`. Raises OSError, or BlockFileError if the file is not this block, complete and intact;
    `pages` are then undefined."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        size = os.fstat(descriptor).st_size
        if size != layout.file_bytes:
            raise BlockFileError(f"it has {size} bytes, not {layout.file_bytes}")
        header = bytearray(HEADER_BYTES)
        count = os.preadv(descriptor, [header, *pages], 0)
    finally:
        os.close(descriptor)
    if count != layout.file_bytes:
        raise BlockFileError(f"it ends after {count} bytes")
    keys = header[: _KEYS.size]
    if keys[: len(MAGIC)] != MAGIC:
        raise BlockFileError("it is not a block file of this format")
    if _CHECK.unpack_from(header, _KEYS.size)[0] != zlib.crc32(keys):
        raise BlockFileError("its header is corrupt")
    if bytes(header) != layout.header(group, block_hash, _KEYS.unpack(keys)[-1]):
        raise BlockFileError("it is another block's, or of another model or layout")
    if _checksum(pages) != _KEYS.unpack(keys)[-1]:
        raise BlockFileError("its content is corrupt")


def _checksum(pages: Sequence[Buffer]) -> int:
    checksum = 0
    for page in pages:
        checksum = zlib.crc32(page, checksum)
    return checksum
