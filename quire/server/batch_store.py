"""Batches on disk. Only the runner (quire/server/batch_runner.py) changes a record; others ask it by a mark.

keys/OWNER/batches/ID.json the record keys/OWNER/batches/ID.input hard link to the input file, which its client may
delete meanwhile keys/OWNER/batches/ID.journal results in the requests' order, as `quire run-batch` writes them
keys/OWNER/batches/ID.cancel the mark: end it
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from quire.server.errors import ApiError, invalid_request
from quire.server.file_store import (
    FILES_PER_BATCH,
    MAX_RECORDS,
    FileStore,
    Space,
    no_room_is_told,
    over_quota,
    read_or_none,
    write_whole,
)
from quire.server.protocol.files import (
    MOST_EXPIRY,
    BatchError,
    BatchErrors,
    BatchObject,
    BatchRequest,
    RequestCounts,
)

BATCH_ID = re.compile(r"batch_[a-z0-9-]{1,63}-[0-9a-f]{32}")
ENDED = ("completed", "failed", "expired", "cancelled")
MAX_KEPT_BATCHES = 1000
"""Records of one key; the oldest ended ones leave for more."""


class StoredBatch(msgspec.Struct, kw_only=True):
    """Record of a batch. outcome: status at its end, once decided. times: status -> Unix time in seconds. output_id,
    error_id: ids of its files; empty ones are not written."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_ns: int
    expires_at: int
    metadata: dict[str, str] | None
    output_life: int
    status: str = "validating"
    outcome: str = ""
    times: dict[str, int] = {}
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: list[BatchError] = []
    output_id: str = ""
    error_id: str = ""

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def to_object(self) -> BatchObject:
        found = BatchObject(
            id=self.id,
            endpoint=self.endpoint,
            errors=BatchErrors(self.errors) if self.errors else None,
            input_file_id=self.input_file_id,
            completion_window=self.completion_window,
            status=self.status,
            output_file_id=self.output_id or None if self.has_ended else None,
            error_file_id=self.error_id or None if self.has_ended else None,
            created_at=self.created_ns // 10**9,
            expires_at=self.expires_at,
            request_counts=RequestCounts(self.total, self.completed, self.failed),
            metadata=self.metadata,
        )
        return msgspec.structs.replace(found, **{f"{status}_at": at for status, at in self.times.items()})


class KnownBatch(NamedTuple):
    created_ns: int
    id: str


class Batches:
    """Batches of one key on disk, for the routes and the runner."""

    def __init__(self, space: Space) -> None:
        self._space, self._store = space, space.store
        self._directory = space.batches

    def path(self, batch_id: str, kind: str) -> Path:
        return self._directory / f"{batch_id}.{kind}"

    def open_mark(self, batch_id: str) -> Path:
        return self._store.open_directory / f"{self._space.owner}.{batch_id}"

    def create(self, body: BatchRequest) -> StoredBatch:
        """Record a new batch. Raises ApiError: 404 for an unknown file, 429 for too many open batches."""
        found = self._space.find_file(body.input_file_id, "input_file_id")
        quotas, now = self._store.quotas, self._store.clock()
        hours = int(body.completion_window.removesuffix("h"))
        batch = StoredBatch(
            id=self._store.new_id("batch_"),
            endpoint=body.endpoint,
            input_file_id=found.id,
            completion_window=body.completion_window,
            created_ns=int(now * 10**9),
            expires_at=int(now) + hours * 3600,
            metadata=body.metadata,
            output_life=body.output_expires_after.seconds if body.output_expires_after else MOST_EXPIRY,
        )
        with self._space.lock(), no_room_is_told():
            num_open = self._space.num_open_batches()
            if num_open >= quotas.max_open_batches:
                raise over_quota(f"this API key has {num_open} open batches, as many as it may (--max-open-batches)")
            self._space.check_num_files(FILES_PER_BATCH)
            used = self._space.num_used_bytes()
            if used >= quotas.max_bytes:
                raise over_quota(f"this API key's files have {used} bytes, of {quotas.max_bytes} (--files-quota)")
            self._drop_oldest()
            try:
                os.link(self._space.data_path(found.id), self.path(batch.id, "input"))
            except FileNotFoundError:  # deleted this instant
                self._space.find_file(found.id, "input_file_id")
                raise
            self.open_mark(batch.id).touch(mode=0o600)
            self._write(batch)
        return batch

    def find_batch(self, batch_id: str) -> StoredBatch:
        """Record of a batch of this key. Raises ApiError (404)."""
        found = self.read(batch_id) if BATCH_ID.fullmatch(batch_id) else None
        if found is None:
            raise invalid_request(
                f"No batch found with id {batch_id[:200]!r}", param="batch_id", code="batch_not_found", status=404
            )
        return found

    def read(self, batch_id: str) -> StoredBatch | None:
        """Record, with the mark of a cancellation applied; None: there is none that can be read."""
        path = self.path(batch_id, "json")
        content = read_or_none(path)
        found = None if content is None else self._store.decode(path, content, StoredBatch)
        if found is None:
            return None
        mark = None if found.has_ended else read_or_none(self.path(batch_id, "cancel"))
        if mark is not None and found.status in ("validating", "in_progress"):
            found.status = "cancelling"
            found.times["cancelling"] = int(mark or 0) or int(self._store.clock())
        return found

    def list_known(self) -> list[KnownBatch]:
        """All batches of this key, the earliest first. Each record is read once, for its time of creation."""
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            names = [name.removesuffix(".json") for name in os.listdir(self._directory) if name.endswith(".json")]
        found = [self._known(name) for name in names if BATCH_ID.fullmatch(name)]
        return sorted(each for each in found if each is not None)

    def _known(self, batch_id: str) -> KnownBatch | None:
        times = self._store.batch_times
        if batch_id not in times:
            if (batch := self.read(batch_id)) is None:
                return None
            if len(times) >= MAX_RECORDS:
                times.clear()
            times[batch_id] = batch.created_ns
        return KnownBatch(times[batch_id], batch_id)

    def read_all(self, known: Sequence[KnownBatch]) -> list[StoredBatch]:
        return [batch for each in known if (batch := self.read(each.id)) is not None]

    def write(self, batch: StoredBatch) -> None:
        with self._space.lock():  # a sweep takes half-written files for remains
            self._write(batch)

    def _write(self, batch: StoredBatch) -> None:
        write_whole(self.path(batch.id, "json"), msgspec.json.encode(batch))

    def cancel(self, batch_id: str) -> StoredBatch:
        """Ask for a batch's end. Raises ApiError (400) if it has ended."""
        found = self.find_batch(batch_id)
        if found.has_ended:
            raise _ended(found)
        if found.status in ("validating", "in_progress"):
            with self._space.lock(), no_room_is_told():
                write_whole(self.path(batch_id, "cancel"), str(int(self._store.clock())).encode())
        return self.find_batch(batch_id)

    def is_cancelled(self, batch_id: str) -> bool:
        return self.path(batch_id, "cancel").exists()

    def clear(self, batch_id: str) -> None:
        """Remove what an ended batch no longer needs."""
        for kind in ("journal", "input", "cancel"):
            self.path(batch_id, kind).unlink(missing_ok=True)
        self.open_mark(batch_id).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove records of batches that ended long ago, and what belongs to no batch."""
        with self._space.lock():  # a batch is made under it
            names = os.listdir(self._directory)
            known = {name.removesuffix(".json") for name in names if name.endswith(".json")}
            for name in names:
                if name.rpartition(".")[0] not in known:
                    (self._directory / name).unlink(missing_ok=True)
                elif name.endswith(".json") and self._store.is_outlived(self._directory / name):
                    self._drop_outlived(name.removesuffix(".json"))
            prefix = f"{self._space.owner}."
            for name in os.listdir(self._store.open_directory):
                if name.startswith(prefix) and name.removeprefix(prefix) not in known:
                    (self._store.open_directory / name).unlink(missing_ok=True)

    def _drop_outlived(self, batch_id: str) -> None:
        batch = self.read(batch_id)
        if batch is None or (batch.has_ended and batch.expires_at < self._store.clock() - MOST_EXPIRY):
            self._drop(batch_id)

    def _drop_oldest(self) -> None:
        known = self.list_known()
        num_left = len(known) - MAX_KEPT_BATCHES + 1
        for each in known:
            if num_left <= 0:
                return
            batch = self.read(each.id)
            if batch is not None and batch.has_ended:
                self._drop(each.id)
                num_left -= 1

    def _drop(self, batch_id: str) -> None:
        self.clear(batch_id)
        self.path(batch_id, "json").unlink(missing_ok=True)
        self._store.batch_times.pop(batch_id, None)


def open_batches(store: FileStore) -> list[tuple[str, str]]:
    """(owner, batch id) of the batches that have not ended."""
    pairs = (name.partition(".") for name in os.listdir(store.open_directory))
    return [(owner, batch_id) for owner, _, batch_id in pairs if BATCH_ID.fullmatch(batch_id)]


def _ended(batch: StoredBatch) -> ApiError:
    return invalid_request(f"Cannot cancel a batch with status {batch.status!r}.", param="batch_id", code="batch_ended")
