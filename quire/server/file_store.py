"""Files of clients on disk: a directory for each key, quotas, and expiry. Several processes share the directory.

DIRECTORY/server.lock, runner.lock; open/OWNER.BATCH: batches that have not ended; keys/OWNER/files/ID.data, ID.json: a
file exists while its record (.json) does; keys/OWNER/incoming/RANDOM.BYTES: uploads, each locked by its process;
keys/OWNER/batches/: quire/server/batch_store.py.

No name in it comes from a client. Every function may wait for the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from quire.errors import ConfigError
from quire.logging import get_logger
from quire.server.errors import ApiError, invalid_request, overloaded, unavailable
from quire.server.protocol.files import MOST_EXPIRY, FileObject

logger = get_logger(__name__)

FILE_ID = re.compile(r"file-[a-z0-9-]{1,63}-[0-9a-f]{32}")
OWNER = re.compile(r"[0-9a-f]{64}|anyone")
ANYONE = "anyone"
"""Owner of the files of a server without keys."""
BATCH_PURPOSE, OUTPUT_PURPOSE = "batch", "batch_output"
RETRY_SECONDS = 10
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

FILES_PER_BATCH = 2
NUM_THREADS = 8
MAX_RECORDS = 100_000
"""Records that a process remembers."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Quotas:
    """Limits of one key. max_bytes: total of its files, arriving uploads, and what its batches keep. max_files:
    includes those that its open batches may make."""

    max_bytes: int
    max_file_bytes: int
    max_files: int
    max_open_batches: int


class StoredFile(msgspec.Struct, frozen=True):
    """Record of a file. created_ns: Unix time in nanoseconds, which orders lists."""

    id: str
    num_bytes: int
    created_ns: int
    expires_at: int
    filename: str
    purpose: str

    def to_object(self) -> FileObject:
        created = self.created_ns // 10**9
        return FileObject(self.id, self.num_bytes, created, self.expires_at, self.filename, self.purpose)


class FileStore:
    def __init__(
        self, directory: Path, server_name: str, quotas: Quotas, clock: Callable[[], float] = time.time
    ) -> None:
        """server_name: part of all ids, so a router in front of several servers knows whose they are. Raises
        ConfigError if the directory cannot be used."""
        self.directory, self.quotas, self.clock = directory, quotas, clock
        self._server_name = re.sub("[^a-z0-9]+", "-", server_name.lower()).strip("-")[:63].strip("-") or "quire"
        self._threads = ThreadPoolExecutor(NUM_THREADS, "quire: files")
        self._records: dict[str, StoredFile] = {}
        """Records read from disk; a record never changes."""
        self.batch_times: dict[str, int] = {}
        """Batch id -> its creation in Unix time, in nanoseconds."""
        self._told: set[Path] = set()
        """Files that cannot be read, as the log says."""
        try:
            for part in (directory, directory / "keys", directory / "open"):
                part.mkdir(mode=0o700, parents=True, exist_ok=True)
            if directory.stat().st_uid != os.getuid():
                raise ConfigError(f"files_dir: {directory} belongs to another user", param="files_dir")
            directory.chmod(0o700)
            _check_hard_links(directory)
        except OSError as error:
            raise ConfigError(f"files_dir: cannot use {directory}: {error.strerror}", param="files_dir") from None

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function on a thread for files."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args, **kwargs))

    def begin(self, function: Callable[[], object]) -> None:
        """Run a function on a thread for files without waiting for its end."""
        self._threads.submit(function)

    @property
    def open_directory(self) -> Path:
        return self.directory / "open"

    def new_id(self, prefix: str) -> str:
        """New id of a file or batch. prefix: "file-" or "batch_"."""
        return f"{prefix}{self._server_name}-{secrets.token_hex(16)}"

    def space(self, owner: str) -> Space:
        assert OWNER.fullmatch(owner), "an owner is a digest"
        return Space(self, owner, self.directory / "keys" / owner)

    def owners(self) -> list[str]:
        return [name for name in os.listdir(self.directory / "keys") if OWNER.fullmatch(name)]

    def read_record(self, path: Path) -> StoredFile | None:
        """Record in a file; None if there is none, or a damaged one."""
        found = self._records.get(path.name)
        if found is None:
            if len(self._records) >= MAX_RECORDS:  # some are of files that other processes have deleted
                self._records.clear()
            content = read_or_none(path)
            if content is None:
                return None
            found = self.decode(path, content, StoredFile)
            if found is not None:
                self._records[path.name] = found
        return found

    def decode(self, path: Path, content: bytes, kind: type[T]) -> T | None:
        """Record in a file's content; None, which the log tells, for a damaged one or one of another version."""
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.tell_once(path, error)
            return None

    def tell_once(self, path: Path, error: Exception) -> None:
        if path not in self._told:
            self._told.add(path)
            logger.error("files: %s cannot be read, and is left out: %s", path, error)

    def is_outlived(self, path: Path) -> bool:
        """True if a file is older than anything here is kept."""
        return path.stat().st_mtime < self.clock() - MOST_EXPIRY

    def forget(self, path: Path) -> None:
        self._records.pop(path.name, None)


class Space:
    """Directory with one key's files: lists, quotas, uploads, expiry."""

    def __init__(self, store: FileStore, owner: str, directory: Path) -> None:
        self.store, self.owner = store, owner
        self.directory = directory
        self.files, self.incoming = directory / "files", directory / "incoming"
        self.batches = directory / "batches"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Exclude other threads and processes. Makes the directories."""
        for part in (self.directory, self.files, self.incoming, self.batches):
            part.mkdir(mode=0o700, exist_ok=True)
        file = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def list_files(self) -> list[StoredFile]:
        """Live files, the earliest first."""
        now = self.store.clock()
        found = (each for each in self._all_files() if each.expires_at > now)
        return sorted(found, key=lambda each: (each.created_ns, each.id))

    def _all_files(self) -> list[StoredFile]:
        """Files that are on disk, expired ones too."""
        with contextlib.suppress(FileNotFoundError):
            paths = [self.files / name for name in os.listdir(self.files) if name.endswith(".json")]
            return [record for path in paths if (record := self._record(path)) is not None]
        return []

    def find_file(self, file_id: str, param: str = "file_id") -> StoredFile:
        """Record of a live file. Raises ApiError (404) for an id that this key has not."""
        record = self._record(self.files / f"{file_id}.json") if FILE_ID.fullmatch(file_id) else None
        if record is None or record.expires_at <= self.store.clock():
            raise invalid_request(
                f"No such File object: {file_id[:200]!r}", param=param, code="file_not_found", status=404
            )
        return record

    def data_path(self, file_id: str) -> Path:
        return self.files / f"{file_id}.data"

    def delete_file(self, file_id: str) -> None:
        """Delete a file. Raises ApiError (404) as `find_file` does."""
        self.find_file(file_id)
        with self.lock():
            self._remove(file_id)

    def num_used_bytes(self) -> int:
        """Bytes on disk and reserved ones of uploads. Call under the lock."""
        reserved = sum(int(name.partition(".")[2]) for name in os.listdir(self.incoming))
        return reserved + sum(each.num_bytes for each in self._all_files()) + self._num_batch_bytes()

    def _num_batch_bytes(self) -> int:
        total = 0
        with os.scandir(self.batches) as entries:
            for entry in entries:
                is_journal, is_input = entry.name.endswith(".journal"), entry.name.endswith(".input")
                with contextlib.suppress(FileNotFoundError):  # its batch has ended this instant
                    if is_journal or (is_input and entry.stat().st_nlink == 1):
                        total += entry.stat().st_size
        return total

    def num_open_batches(self) -> int:
        prefix = f"{self.owner}."
        return sum(name.startswith(prefix) for name in os.listdir(self.store.open_directory))

    def check_num_files(self, num_more: int) -> None:
        """Raise ApiError (429) unless there may be more files besides those that are there, arrive, or are to come of
        open batches. Call under the lock."""
        num_arriving = sum(not name.endswith(".0") for name in os.listdir(self.incoming))  # .0: results, counted below
        num_files = len(self._all_files()) + num_arriving + FILES_PER_BATCH * self.num_open_batches()
        most = self.store.quotas.max_files
        if num_files + num_more > most:
            raise over_quota(
                f"this API key has {num_files} files, of at most {most} (--max-files), with {FILES_PER_BATCH} for each "
                "open batch: delete some"
            )

    def begin_upload(self, num_bytes: int) -> IncomingFile:
        """Reserve a file of at most `num_bytes`. Raises ApiError: 413 for a too large file and 429 for a full quota."""
        quotas = self.store.quotas
        if num_bytes > quotas.max_file_bytes:
            raise too_large(quotas.max_file_bytes)
        with self.lock():
            self.check_num_files(1)
            used = self.num_used_bytes()
            if used + num_bytes > quotas.max_bytes:
                raise over_quota(
                    f"this API key's files have {used} bytes, of at most {quotas.max_bytes} (--files-quota): there is "
                    f"no room for {num_bytes} more"
                )
            return IncomingFile(self, num_bytes)

    def publish(self, data: Path, record: StoredFile) -> None:
        """Turn a written file into a file of this key; replaces one with its id. Call under the lock."""
        os.replace(data, self.data_path(record.id))
        write_whole(self.files / f"{record.id}.json", msgspec.json.encode(record))

    def sweep(self) -> None:
        """Remove expired files, and remains of processes that have ended in the midst of something."""
        now = self.store.clock()
        if not self.files.exists():
            return
        with self.lock():
            names = set(os.listdir(self.files))
            for name in names:
                file_id, _, kind = name.rpartition(".")
                if kind == "json":
                    record = self._record(self.files / name)
                    if record.expires_at <= now if record is not None else self.store.is_outlived(self.files / name):
                        self._remove(file_id)
                elif kind != "data" or f"{file_id}.json" not in names:
                    (self.files / name).unlink(missing_ok=True)
            for name in os.listdir(self.incoming):
                path = self.incoming / name
                with contextlib.suppress(FileNotFoundError), held(path) as is_free:
                    if is_free:
                        path.unlink()

    def _remove(self, file_id: str) -> None:
        record = self.files / f"{file_id}.json"
        record.unlink(missing_ok=True)
        self.data_path(file_id).unlink(missing_ok=True)
        self.store.forget(record)

    def _record(self, path: Path) -> StoredFile | None:
        found = self.store.read_record(path)
        if found is not None and not path.exists():
            self.store.forget(path)  # another process has deleted it
            return None
        return found


class IncomingFile:
    """Upload that arrives. Its process holds a lock on it; `Space.sweep` removes those without one."""

    def __init__(self, space: Space, num_reserved: int) -> None:
        """Open it and reserve `num_reserved` bytes, under the space's lock."""
        self._space, self._num_reserved = space, num_reserved
        self._path = space.incoming / f"{secrets.token_hex(16)}.{num_reserved}"
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        """Append bytes. Raises ApiError: 413 beyond the reservation, 503 if the disk is full."""
        if self.num_bytes + len(data) > self._num_reserved:
            raise too_large(self._num_reserved)
        with no_room_is_told():
            _write_all(self._file, data)
        self.num_bytes += len(data)

    def keep(self, filename: str, purpose: str, life: int) -> StoredFile:
        """Make it a file; life: in seconds."""
        store = self._space.store
        now = store.clock()
        with no_room_is_told():
            os.fsync(self._file)
            record = StoredFile(
                store.new_id("file-"), self.num_bytes, int(now * 10**9), int(now) + life, filename, purpose
            )
            with self._space.lock():
                self._space.publish(self._path, record)
        return record

    def close(self) -> None:
        """Remove what was not kept. Idempotent."""
        if self._file >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1


@contextlib.contextmanager
def claimed(directory: Path | None) -> Iterator[None]:
    """Hold a directory for one server. None: nothing to hold. Raises ConfigError if a server has it."""
    if directory is None:
        yield
        return
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with held(directory / "server.lock", makes=True) as is_free:
            if is_free:
                yield
                return
    except OSError as error:
        raise ConfigError(f"files_dir: cannot use {directory}: {error.strerror}", param="files_dir") from None
    raise ConfigError(f"files_dir: another server uses {directory}", param="files_dir")


@contextlib.contextmanager
def held(path: Path, *, makes: bool = False) -> Iterator[bool]:
    """Lock a file without waiting, if no other process or thread holds it; yields whether it did. makes: create it."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if makes else 0), 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(file)


def _check_hard_links(directory: Path) -> None:
    """Raise ConfigError for a file system without them. A batch has a hard link to its input."""
    file = directory / f".{secrets.token_hex(8)}"
    link = file.with_suffix(".link")
    file.touch(mode=0o600)
    try:
        os.link(file, link)
    except OSError as error:
        reason = f"its file system makes no hard links ({error.strerror})"
        raise ConfigError(f"files_dir: cannot use {directory}: {reason}", param="files_dir") from None
    finally:
        for each in (file, link):
            each.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there in full or not at all, also after a loss of power."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            _write_all(file, content)
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write_all(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def read_or_none(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def no_room_is_told() -> Iterator[None]:
    """Turn a full disk into ApiError (503)."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise unavailable("the server's disk for files is full") from None


def too_large(limit: int) -> ApiError:
    return invalid_request(
        f"the file is larger than the limit of {limit} bytes (--max-file-size)", param="file",
        code="request_too_large", status=413,
    )  # fmt: skip


def over_quota(message: str) -> ApiError:
    error = overloaded(message, RETRY_SECONDS)
    error.detail.code = "file_quota_exceeded"
    return error
