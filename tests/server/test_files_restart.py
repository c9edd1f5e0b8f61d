"""Batches of a server that ends, is killed, or has several API processes: no line is lost, none is answered twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from quire.server import batch_runner
from quire.server.batch_runner import BatchRunner
from quire.server.batch_store import Batches, StoredBatch
from quire.server.file_store import Space
from tests.server.conftest import serving
from tests.server.serve_process import Process
from tests.server.test_files import begin, client_of, ended, line, requests, results, settings_of

GUARD_SECONDS = 120
ENDED = ("completed", "failed", "expired", "cancelled")


def journal_of(directory: Path) -> list[bytes]:
    """Whole lines of the only journal."""
    found = list(directory.rglob("*.journal"))
    return found[0].read_bytes().splitlines(keepends=True) if found else []


@pytest.mark.parametrize("cut", [b"", b'{"id": "batch_req_1", "custom_id": "r4", "resp', b"\0\0\0\0", b"{}\n{}\n"])
async def test_a_batch_goes_on_behind_its_journal(model_path: Path, tmp_path: Path, cut: bytes) -> None:
    settings = settings_of(tmp_path)
    async with serving(model_path, settings, live=True) as served:
        batch = await begin(client_of(served), b"\xef\xbb\xbf" + requests(8))
    [path] = (tmp_path / "files").rglob("*.input")
    before = [
        {"id": f"old{n}", "custom_id": f"r{n}", "response": {"status_code": 200, "request_id": "x", "body": {"n": n}}}
        for n in range(3)
    ]
    before.append({"id": "old3", "custom_id": "r3", "response": None, "error": {"message": "wrong"}})
    lines = b"".join(json.dumps({"error": None, **each}).encode() + b"\n" for each in before)
    path.with_suffix(".journal").write_bytes(lines + cut)
    async with serving(model_path, settings, live=True) as served:
        served.context.start()
        client = client_of(served)
        found = await ended(client, batch.id)
        counts = found.request_counts
        assert (found.status, counts.total, counts.completed, counts.failed) == ("completed", 8, 7, 1)
        answers = await results(client, found.output_file_id)
        assert [each["id"] for each in answers[:3]] == ["old0", "old1", "old2"]
        assert [each["custom_id"] for each in answers] == ["r0", "r1", "r2", "r4", "r5", "r6", "r7"]
        assert [each["id"] for each in await results(client, found.error_file_id)] == ["old3"]
        served.context.drain()
    assert list((tmp_path / "files").rglob("*.journal")) == list((tmp_path / "files" / "open").iterdir()) == []


@pytest.mark.parametrize(
    "moment", ["file_store.Space.publish", "batch_store.Batches.write", "batch_store.Batches.clear"]
)
async def test_the_end_of_a_batch_is_repeated(
    model_path: Path, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of writing the files of results fails once, and the state on disk alone is gone on from."""
    owner = {"Space": Space, "Batches": Batches}[moment.split(".")[1]]
    name = moment.split(".")[2]
    real, planned = getattr(owner, name), []

    def fails_once(self: Any, *arguments: Any) -> None:
        batch = arguments[0] if isinstance(arguments[0], StoredBatch) else None
        if not planned and (batch is None or batch.has_ended):
            [path] = (tmp_path / "files").rglob("batch_*.json")
            planned.append(json.loads(path.read_bytes())["output_id"])
            raise RuntimeError("killed")
        real(self, *arguments)

    monkeypatch.setattr("quire.server.batch_runner.DISK_SECONDS", 0.01)
    async with serving(model_path, settings_of(tmp_path), live=True) as served:
        client = client_of(served)
        batch = await begin(client, requests(3))
        monkeypatch.setattr(owner, name, fails_once)
        served.context.start()
        found = await ended(client, batch.id)
        async with asyncio.timeout(120):  # what a batch no longer needs goes after clients see its end
            while list((tmp_path / "files" / "open").iterdir()):
                await asyncio.sleep(0.01)
        assert (found.status, [found.output_file_id]) == ("completed", planned)
        assert [each["custom_id"] for each in await results(client, found.output_file_id)] == ["r0", "r1", "r2"]
        assert len((await client.files.list(purpose="batch_output")).data) == 1
        assert journal_of(tmp_path) == []
        served.context.drain()


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GUARD_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def until_answered(directory: Path, count: int) -> None:
    until(lambda: len(journal_of(directory)) >= count)


def at_its_end(client: openai.OpenAI, batch_id: str) -> Any:
    until(lambda: client.batches.retrieve(batch_id).status in ENDED)
    return client.batches.retrieve(batch_id)


@contextlib.contextmanager
def served_on(model_path: Path, directory: Path, count: int) -> Iterator[Process]:
    process = Process(
        model_path, "slow_between_signals", served_model_name=["tiny"], api_server_count=count, files_dir=str(directory)
    )
    try:
        yield process.wait_ready()
    finally:
        process.popen.kill()
        process.popen.communicate()


def runner_of(directory: Path, process: Process) -> psutil.Process:
    """The API process that holds the lock."""
    place = os.stat(directory / "runner.lock").st_ino
    [pid] = [int(each.split()[4]) for each in Path("/proc/locks").read_text().splitlines() if f":{place} " in each]
    return psutil.Process(pid)


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2])
def test_kill_9_loses_no_line_and_answers_none_twice(model_path: Path, tmp_path: Path, count: int) -> None:
    directory = tmp_path / "files"
    known: list[bytes] = []
    batch_id = ""
    for attempt in range(3):
        with served_on(model_path, directory, count) as process:
            client = openai.OpenAI(base_url=f"{process.url}/v1", api_key="x", max_retries=3)
            if not batch_id:
                file = client.files.create(file=("in", requests(20, prompt="abc", max_tokens=6)), purpose="batch")
                batch = client.batches.create(
                    input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
                )
                batch_id = batch.id
                client.files.delete(file.id)
            until_answered(directory, len(known) + 2)
            if count > 1 and attempt == 1:
                first = runner_of(directory, process)
                first.send_signal(signal.SIGKILL)  # another API process goes on
                until_answered(directory, len(known) + 4)
                assert runner_of(directory, process).pid != first.pid
            if attempt == 2:
                process.hurry()
                found = at_its_end(client, batch_id)
                assert found.output_file_id is not None
                output = client.files.content(found.output_file_id).content.splitlines(keepends=True)
                break
            process.popen.send_signal(signal.SIGKILL)
            process.popen.wait()
        now = [each for each in journal_of(directory) if each.endswith(b"\n")]
        assert now[: len(known)] == known, "what was answered stands"
        known = now
    assert output[: len(known)] == known
    assert [json.loads(each)["custom_id"] for each in output] == [f"r{number}" for number in range(20)]


@pytest.mark.long
def test_a_server_that_ends_in_order_writes_no_aborted_answer(model_path: Path, tmp_path: Path) -> None:
    directory = tmp_path / "files"
    content = b"".join(line(number, prompt="abc", max_tokens=60) for number in range(6))
    with served_on(model_path, directory, 1) as process:
        client = openai.OpenAI(base_url=f"{process.url}/v1", api_key="x")
        file = client.files.create(file=("in", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
        time.sleep(1)
        process.signal(signal.SIGTERM)
        status, _ = process.finish()
        assert status == 0
        assert journal_of(directory) == []
    with served_on(model_path, directory, 1) as process:
        process.hurry()
        client = openai.OpenAI(base_url=f"{process.url}/v1", api_key="x")
        found = at_its_end(client, batch.id)
        assert found.output_file_id is not None
        answers = [json.loads(each) for each in client.files.content(found.output_file_id).text.splitlines()]
        assert [each["response"]["body"]["choices"][0]["finish_reason"] for each in answers] == ["length"] * 6


async def test_a_batch_goes_on_when_the_disk_has_room_again(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up amid a line; the half is removed and the line is answered again."""
    num_failures = 0

    def fills_up(file: Any, data: bytes) -> None:
        nonlocal num_failures
        if num_failures < 3 and len(journal_of(tmp_path)) >= 1 + num_failures:
            num_failures += 1
            write(file, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        write(file, data)

    write = batch_runner._write
    monkeypatch.setattr(batch_runner, "_write", fills_up)
    monkeypatch.setattr(batch_runner, "DISK_SECONDS", 0.01)
    async with serving(model_path, settings_of(tmp_path), live=True) as served:
        served.context.start()
        client = client_of(served)
        found = await ended(client, (await begin(client, requests(9))).id)
        answers = await results(client, found.output_file_id)
        assert [each["custom_id"] for each in answers] == [f"r{number}" for number in range(9)]
        assert num_failures == 3
        served.context.drain()


async def test_keys_take_turns(model_path: Path, tmp_path: Path) -> None:
    """A long batch of one key does not hold up another key's."""
    async with serving(model_path, settings_of(tmp_path), executor="slow", live=True, max_num_seqs=4) as served:
        served.context.start()
        one, two = client_of(served), client_of(served, "two")
        long = await begin(one, requests(40, prompt="abc", max_tokens=60))
        async with asyncio.timeout(120):
            await served.until_running(2)
        short = await begin(two, requests(2, prompt="=a"))
        served.hurry()
        assert (await ended(two, short.id)).status == "completed"
        found = await ended(one, long.id)
        assert (found.status, found.request_counts.completed) == ("completed", 40)
        assert (await two.batches.retrieve(short.id)).completed_at <= found.completed_at
        served.context.drain()


@pytest.mark.parametrize("end", ["cancelled", "expired"])
async def test_a_batch_ends_while_another_one_of_its_key_runs(model_path: Path, tmp_path: Path, end: str) -> None:
    async with serving(model_path, settings_of(tmp_path), executor="slow", live=True, max_num_seqs=4) as served:
        served.context.start()
        client = client_of(served)
        long = await begin(client, requests(3, prompt="abc", max_tokens=200))
        async with asyncio.timeout(120):
            await served.until_running(2)
        waiting = await begin(client, requests(2))
        if end == "cancelled":
            await client.batches.cancel(waiting.id)
        else:
            [path] = (tmp_path / "files").rglob(f"{waiting.id}.json")
            path.write_text(json.dumps({**json.loads(path.read_text()), "expires_at": waiting.created_at - 1}))
        found = await ended(client, waiting.id)
        assert (found.status, found.request_counts.completed) == (end, 0)
        assert (await client.batches.retrieve(long.id)).status == "in_progress"
        await client.batches.cancel(long.id)
        assert (await ended(client, long.id)).status == "cancelled"
        served.context.drain()


async def test_a_batch_that_ends_while_records_are_read_is_not_begun_again(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are read while the batch writes its files, and looked at when it has ended."""
    begun, is_over = [], threading.Event()
    monkeypatch.setattr(batch_runner, "POLL_SECONDS", 0.01)
    read, guarded, note_end = (getattr(BatchRunner, name) for name in ("_read_open", "_guarded", "_note_end"))

    def read_slowly(self: BatchRunner, running: Container[str]) -> list[tuple[str, StoredBatch]]:
        found: list[tuple[str, StoredBatch]] = read(self, running)
        if begun and not is_over.is_set():
            for _, each in found:
                each.status = "finalizing"
            is_over.wait(120)
        return found

    async def begin_to_run(self: BatchRunner, owner: str, batch: StoredBatch) -> None:
        begun.append(batch.id)
        await guarded(self, owner, batch)

    def end(self: BatchRunner, *arguments: Any) -> None:
        note_end(self, *arguments)
        is_over.set()

    for name, replacement in (("_read_open", read_slowly), ("_guarded", begin_to_run), ("_note_end", end)):
        monkeypatch.setattr(BatchRunner, name, replacement)
    async with serving(model_path, settings_of(tmp_path), live=True) as served:
        client = client_of(served)
        batch = await begin(client, requests(3))
        served.context.start()
        assert (await ended(client, batch.id)).status == "completed"
        later = await begin(client, requests(1))
        assert (await ended(client, later.id)).status == "completed"
        assert begun == [batch.id, later.id]
        served.context.drain()
