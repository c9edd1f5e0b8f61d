"""Records of files and batches on disk: damage, quotas, sweeps."""

from __future__ import annotations

import asyncio
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.server import batch_runner, batch_store, file_store
from quire.server.batch_check import check_input
from quire.server.batch_ends import undone
from quire.server.batch_lines import AnsweredLine
from quire.server.batch_store import Batches
from quire.server.errors import ApiError
from quire.server.file_store import FileStore, Quotas, Space, StoredFile, held, read_or_none, write_whole
from quire.server.files import CHUNK_BYTES, OpenFile
from quire.server.protocol.files import MOST_EXPIRY, BatchRequest
from tests.server.conftest import Served, serving
from tests.server.test_files import begin, client_of, ended, line, requests, results, served, settings_of

__all__ = ["served"]

OWNER = "a" * 64


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def space(tmp_path: Path, clock: Clock) -> Space:
    return FileStore(tmp_path / "files", "x", Quotas(10_000, 5000, 10, 5), clock).space(OWNER)


def put(space: Space, content: bytes = b"abc") -> StoredFile:
    upload = space.begin_upload(len(content))
    try:
        upload.write(content)
        return upload.keep("name", "batch", 3600)
    finally:
        upload.close()


def order(file: StoredFile) -> BatchRequest:
    return BatchRequest(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")


def test_a_record_is_written_whole_by_a_disk_that_takes_little_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(file_store.os, "write", lambda file, data: real(file, data[:3]))
    write_whole(tmp_path / "record", b"0123456789")
    assert (tmp_path / "record").read_bytes() == b"0123456789"


def test_damaged_records_are_left_out_and_leave_at_last(space: Space, clock: Clock) -> None:
    files, batches = [put(space), put(space)], Batches(space)
    made = [batches.create(order(file)) for file in files]
    (space.files / f"{files[0].id}.json").write_bytes(b"")
    space.store.forget(space.files / f"{files[0].id}.json")
    batches.path(made[0].id, "json").write_bytes(b'{"id":')
    assert [each.id for each in space.list_files()] == [files[1].id]
    assert [each.id for each in batches.read_all(batches.list_known())] == [made[1].id]
    for wrong, name in ((space.find_file, files[0].id), (batches.find_batch, made[0].id)):
        with pytest.raises(ApiError):
            wrong(name)
    for path in space.directory.rglob("*.json"):
        os.utime(path, (clock.now, clock.now))
    space.sweep()
    batches.sweep()
    assert batches.path(made[0].id, "json").exists(), "a server of another version may still read it"
    clock.now += MOST_EXPIRY + 1
    space.sweep()
    batches.sweep()
    batches.sweep()
    assert [path.name for path in space.directory.rglob(f"*{made[0].id}*")] == []
    assert list(space.files.iterdir()) == []
    assert all(made[0].id not in name for name in os.listdir(space.store.open_directory))


def test_nothing_is_swept_while_it_is_written(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    def write(path: Path, content: bytes) -> None:
        with held(space.directory / "lock") as is_free:
            assert not is_free, "a sweep removes what is half written"
        written.append(path.suffix)
        write_whole(path, content)

    monkeypatch.setattr(file_store, "write_whole", write)
    monkeypatch.setattr(batch_store, "write_whole", write)
    batches, file = Batches(space), put(space)
    batch = batches.create(order(file))
    batches.write(batch)
    assert batches.cancel(batch.id).status == "cancelling"
    assert written == [".json", ".json", ".json", ".cancel"]


def test_what_batches_keep_counts(space: Space) -> None:
    batches, file = Batches(space), put(space, b"a" * 4000)
    batch = batches.create(order(file))
    assert space.num_used_bytes() == 4000
    space.delete_file(file.id)
    assert space.num_used_bytes() == 4000, "the batch's link keeps the content"
    batches.path(batch.id, "journal").write_bytes(b"b" * 3000)
    assert space.num_used_bytes() == 7000
    with pytest.raises(ApiError, match="7000 bytes"):
        put(space, b"a" * 3001)
    put(space, b"a" * 3000)
    with pytest.raises(ApiError, match="10000 bytes"):
        batches.create(order(space.list_files()[0]))
    batches.clear(batch.id)
    assert space.num_used_bytes() == 3000


def test_expired_files_count_until_they_leave(space: Space, clock: Clock) -> None:
    put(space, b"a" * 4000)
    clock.now += 3601
    assert (space.list_files(), space.num_used_bytes()) == ([], 4000)
    space.sweep()
    assert space.num_used_bytes() == 0


def test_files_of_results_count_before_they_are_made(space: Space) -> None:
    batches, file = Batches(space), put(space)
    made = [batches.create(order(file)) for _ in range(4)]
    put(space)
    with pytest.raises(ApiError, match="10 files, of at most 10"):
        put(space)
    batches.clear(made[0].id)
    put(space)
    with pytest.raises(ApiError, match="9 files, of at most 10"):
        batches.create(order(file))


def test_a_list_reads_its_page_alone(space: Space, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, file = Batches(space), put(space)
    made = []
    for _ in range(4):
        made.append(batches.create(order(file)).id)
        clock.now -= 1  # the last made is the earliest
    assert [each.id for each in batches.list_known()] == made[::-1]
    num_read = []
    monkeypatch.setattr(batch_store, "read_or_none", lambda path: num_read.append(path) or read_or_none(path))
    assert [each.id for each in batches.read_all(batches.list_known()[:2])] == [made[3], made[2]]
    batches.sweep()
    assert len([path for path in num_read if path.suffix == ".json"]) == 2


def test_the_oldest_ended_records_leave(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, file = Batches(space), put(space)
    made = [batches.create(order(file)) for _ in range(3)]
    made[1].status = "completed"
    batches.write(made[1])
    monkeypatch.setattr(batch_store, "MAX_KEPT_BATCHES", 3)
    last = batches.create(order(file))
    assert {each.id for each in batches.list_known()} == {made[0].id, made[2].id, last.id}


def test_errors_of_lines_are_short(tmp_path: Path) -> None:
    wrong = [line(0, "/" + "u" * 9000), line(1).replace(b"POST", b"m" * 9000)]
    (tmp_path / "in").write_bytes(b"".join(wrong))
    _, errors = check_input(tmp_path / "in", "/v1/completions", 10**6)
    assert [each.line for each in errors] == [1, 2]
    assert all(len(each.message) <= 600 for each in errors)


def test_lines_without_results_have_the_same_ids_again(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(requests(3))
    first, again, other = (
        list(undone(batch, tmp_path / "in", [AnsweredLine("r0", False)], "expired")) for batch in ("a", "a", "b")
    )
    assert first == again
    ids = [json.loads(each)["id"] for each in (*first, *other)]
    assert len(set(ids)) == len(ids) == 4


async def test_the_runner_outlives_any_error(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter([RuntimeError("one"), ValueError("two"), OSError("three")])

    def failing(function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if (error := next(errors, None)) is not None:
                raise error
            return function(*arguments, **named)

        return call

    for name in ("held", "open_batches"):
        monkeypatch.setattr(batch_runner, name, failing(getattr(batch_runner, name)))
    monkeypatch.setattr(batch_runner, "DISK_SECONDS", 0.01)
    monkeypatch.setattr(batch_runner, "POLL_SECONDS", 0.01)
    async with serving(model_path, settings_of(tmp_path), live=True) as served:
        client = client_of(served)
        other = client_of(served, "two")
        damaged = await begin(other, line(0))
        [path] = (tmp_path / "files").rglob(f"{damaged.id}.json")
        path.write_bytes(b"{")
        served.context.start()
        assert (await ended(client, (await begin(client, requests(2))).id)).status == "completed"
        assert next(errors, None) is None
        served.context.drain()


async def test_nothing_is_answered_for_a_full_disk(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked, is_full, original = [], True, batch_runner.run_batch

    async def run(*arguments: Any, **named: Any) -> Any:
        asked.append(is_full)
        return await original(*arguments, **named)

    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

        def fileno(self) -> int:
            return os.open(tmp_path, os.O_RDONLY)

    append = batch_runner._append_to
    monkeypatch.setattr(batch_runner, "run_batch", run)
    monkeypatch.setattr(batch_runner, "DISK_SECONDS", 0.01)
    monkeypatch.setattr(batch_runner, "_append_to", lambda path: Full() if is_full else append(path))
    client = client_of(served)
    batch = await begin(client, requests(2))
    while (await client.batches.retrieve(batch.id)).status != "in_progress":
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    is_full = False
    found = await ended(client, batch.id)
    assert (found.status, found.request_counts.completed, asked) == ("completed", 2, [False])
    assert len(await results(client, found.output_file_id)) == 2


def test_a_file_system_without_hard_links_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def link(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("quire.server.file_store.os.link", link)
    with pytest.raises(ConfigError, match="no hard links"):
        FileStore(tmp_path / "files", "x", Quotas(1, 1, 1, 1))
    assert [path for path in (tmp_path / "files").iterdir() if path.is_file()] == []


def test_a_file_that_is_closed_has_no_more_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(CHUNK_BYTES + 1))
    file = OpenFile(tmp_path / "file")
    assert len(file.read()) == CHUNK_BYTES
    file.close()
    with (tmp_path / "other").open("w+b") as other:  # takes the number that is free now
        other.write(b"secret")
        other.seek(0)
        assert file.read() == b""
    file.close()
