"""Directory of the disk tier: paths of blocks, bytes in use, and eviction.

    DIR/lock                                      held by the engine that evicts
    DIR/<namespace>/<two digits>/<hash>-<group>   one block
    DIR/<namespace>/.new-<engine>-<number>        an unfinished block, renamed when complete

Several engines, of the same or different models, may share a directory; the limit counts the files of all. A file's
modification time is its block's last use.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from quire.errors import ConfigError
from quire.step import BlockKey

LEVEL_AFTER_EVICTION = 0.9
"""Share of the limit that an eviction keeps."""
STALE_SECONDS = 3600.0
"""Age in seconds from which an unfinished file counts as left by a dead engine."""

LOCK = "lock"
_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_BLOCK = re.compile(r"([0-9a-f]{64})-([0-9]{1,4})")
_NEW = ".new-"


def require_writable(directory: Path) -> None:
    """Create a directory if needed, and a file in it. Raises ConfigError (`kv_offload_dir`) on failure. Called before
    the model loads."""
    probe = directory / f"{_NEW}probe-{secrets.token_hex(8)}"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe.touch(mode=0o600)
        probe.unlink()
        if (directory / LOCK).exists():
            _Lock(directory / LOCK).close()
    except OSError as error:
        raise ConfigError(
            f"kv_offload_dir: nothing can be stored in {directory}: {error.strerror or error}", param="kv_offload_dir"
        ) from None


class StoredBlock(NamedTuple):
    """Block's file. used: time of the last store or load, in seconds since the epoch. size: bytes."""

    used: float
    size: int
    path: str


class CacheDirectory:
    """One engine's view of `kv_offload_dir`: paths, size and eviction of block files. `path_of` is thread-safe; one
    thread uses the rest."""

    def __init__(self, path: Path, limit: int, namespace: bytes) -> None:
        """limit: maximum bytes of all files. Creates the directories. Raises ConfigError (`kv_offload_dir`) if nothing
        can be stored."""
        self.path = path
        self.limit = limit
        self.own = path / namespace.hex()
        self.num_bytes = 0
        """Bytes of all blocks of all engines, at the last scan."""
        self.num_foreign = 0
        """Foreign files at the last scan."""
        self._written = 0
        self._number = 0
        self._name = secrets.token_hex(8)
        """Random part of the names of this engine's unfinished files."""
        require_writable(path)
        require_writable(self.own)

    def path_of(self, key: BlockKey) -> Path:
        group, block_hash = key
        name = block_hash.hex()
        return self.own / name[:2] / f"{name}-{group}"

    def new_path(self) -> Path:
        """Unique path for a block's file while it is written, before it is renamed to `path_of`."""
        self._number += 1
        return self.own / f"{_NEW}{self._name}-{self._number}"

    def scan(self) -> Iterator[BlockKey]:
        """Scan the directory, count bytes, and yield the keys of the own namespace. At the start."""
        self.num_bytes = self.num_foreign = self._written = 0
        for block in self._blocks():
            self.num_bytes += block.size
            key = self._own_key(block.path)
            if key is not None:
                yield key

    def has_room(self) -> bool:
        """True if a block can be stored without `make_room`, which is due again after limit / 8 stored bytes."""
        return self.num_bytes <= self.limit and self._written <= self.limit // 8

    def count_stored(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._written += num_bytes

    def make_room(self) -> list[BlockKey]:
        """Scan the directory and, beyond its limit, remove the least recently used blocks. Returns removed keys of the
        own namespace. While another engine removes, this removes nothing."""
        blocks = list(self._blocks())
        self.num_bytes = sum(block.size for block in blocks)
        self._written = 0
        gone: list[BlockKey] = []
        if self.num_bytes <= self.limit:
            return gone
        with _Lock(self.path / LOCK) as is_ours:
            if not is_ours:
                return gone
            heapq.heapify(blocks)
            while blocks and self.num_bytes > self.limit * LEVEL_AFTER_EVICTION:
                block = heapq.heappop(blocks)
                with suppress(FileNotFoundError):  # another engine has removed it
                    os.unlink(block.path)
                self.num_bytes -= block.size
                key = self._own_key(block.path)
                if key is not None:
                    gone.append(key)
        return gone

    def _blocks(self) -> Iterator[StoredBlock]:
        self.num_foreign = 0
        for namespace in _entries(self.path):
            if not _NAMESPACE.fullmatch(namespace.name) or not namespace.is_dir(follow_symlinks=False):
                self.num_foreign += namespace.name != LOCK
                continue
            for folder in _entries(namespace.path):
                if folder.is_dir(follow_symlinks=False):
                    yield from self._blocks_in(folder)
                elif folder.name.startswith(_NEW):
                    _remove_if_stale(folder)
                else:
                    self.num_foreign += 1

    def _blocks_in(self, folder: os.DirEntry[str]) -> Iterator[StoredBlock]:
        for entry in _entries(folder.path):
            match = _BLOCK.fullmatch(entry.name)
            if match is None or match[1][:2] != folder.name or not entry.is_file(follow_symlinks=False):
                self.num_foreign += 1
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # removed by another engine
            yield StoredBlock(status.st_mtime, status.st_size, entry.path)

    def _own_key(self, path: str) -> BlockKey | None:
        folder, name = os.path.split(path)
        if os.path.dirname(folder) != str(self.own):
            return None
        block_hash, _, group = name.partition("-")
        return int(group), bytes.fromhex(block_hash)


def _entries(path: Path | str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            yield from entries
    except (FileNotFoundError, PermissionError):
        return


def _remove_if_stale(entry: os.DirEntry[str]) -> None:
    try:
        # After a jump of the clock a live file may be removed; it is then written again.
        if time.time() - entry.stat(follow_symlinks=False).st_mtime > STALE_SECONDS:
            os.unlink(entry.path)
    except FileNotFoundError:
        pass


class _Lock:
    """Non-blocking advisory lock; the system drops it when its process ends. Engines that share a directory evict under
    it."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def __enter__(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)
