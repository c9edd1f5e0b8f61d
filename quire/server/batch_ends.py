from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from quire.server.batch_lines import AnsweredLine, BatchResult, custom_id_of, unanswered
from quire.server.batch_store import StoredBatch
from quire.server.file_store import OUTPUT_PURPOSE, Space, StoredFile, held

_REASONS = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed before the batch was cancelled."),
    "file_quota_exceeded": ("file_quota_exceeded", "The results of the batch exceed the quota of the key's files."),
}
"""Outcome of a batch -> code and message of its lines without results."""


class _Outcome(msgspec.Struct):
    error: object = None


def undone(batch_id: str, source: Path, answered: list[AnsweredLine], outcome: str) -> Iterator[bytes]:
    """Error of each line without a result, the same at each call."""
    code, message = _REASONS[outcome]
    with source.open("rb") as file:
        for number, line in enumerate(unanswered(file, answered)):
            if line.strip():
                error = {"code": code, "message": message}
                digest = hashlib.blake2b(f"{batch_id} {number}".encode(), digest_size=16).hexdigest()
                result = BatchResult(f"batch_req_{digest}", custom_id_of(line), None, error)
                yield msgspec.json.encode(result) + b"\n"


def split_journal(space: Space, batch: StoredBatch, journal: Path, rest: Iterator[bytes]) -> tuple[str, str]:
    """Write the output file (answers) and the error file (errors, then `rest`) under the batch's ids, the same at each
    call. Returns the ids, empty for a file without lines."""
    with contextlib.ExitStack() as stack:
        with space.lock():
            paths = [space.incoming / f"{secrets.token_hex(16)}.0" for _ in range(2)]
            output, errors = (stack.enter_context(open(path, "xb", opener=_private)) for path in paths)
            for path in paths:
                stack.enter_context(held(path))  # the sweeper leaves what is held
        _separate(journal, output, errors)
        errors.writelines(rest)
        plan = ((batch.output_id, "output"), (batch.error_id, "error"))
        ids = []
        for path, file, (file_id, kind) in zip(paths, (output, errors), plan, strict=True):
            file.flush()
            os.fsync(file.fileno())
            num_bytes = file.tell()
            if num_bytes:
                now = space.store.clock()
                name, expires_at = f"{batch.id}_{kind}.jsonl", int(now) + batch.output_life
                record = StoredFile(file_id, num_bytes, int(now * 10**9), expires_at, name, OUTPUT_PURPOSE)
                with space.lock():
                    space.publish(path, record)
            else:
                path.unlink()
            ids.append(file_id if num_bytes else "")
    return ids[0], ids[1]


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _separate(journal: Path, output: BinaryIO, errors: BinaryIO) -> None:
    if not journal.exists():  # cancelled before the first line
        return
    with journal.open("rb") as lines:
        for line in lines:
            has_failed = msgspec.json.decode(line, type=_Outcome).error is not None
            (errors if has_failed else output).write(line)
