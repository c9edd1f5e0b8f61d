"""Standard files that can always be written to, whatever is behind them."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.logging import make_handler
from quire.utils import streams
from quire.utils.streams import GuardedFile, take_num_lost

GUARD = """
import json, os, socket, sys
from quire.utils.streams import guard_streams
guard_streams("stdout", "stderr")
opened = socket.socket()
print("out")
sys.stderr.write("err")
sys.stdout.flush()
with open(sys.argv[1], "w") as report:
    json.dump([opened.fileno(), [os.fstat(fd).st_rdev == os.stat(os.devnull).st_rdev for fd in range(3)]], report)
"""


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """(its reader's end, its writer's end)"""
    reader, writer = os.pipe()
    yield reader, writer
    for fd in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(fd)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PATIENCE_SECONDS", 0.01)


def fill(writer: int) -> None:
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)


def drain(reader: int) -> bytes:
    os.set_blocking(reader, False)
    parts = []
    with contextlib.suppress(BlockingIOError):
        while part := os.read(reader, 65536):
            parts.append(part)
    return b"".join(parts)


def test_a_reader_that_reads_nothing_does_not_hold_up_the_writer_and_hears_on_once_it_reads(
    pipe: tuple[int, int],
) -> None:
    reader, writer = pipe
    file = GuardedFile(writer)
    assert file.write(b"first\n") == 6
    fill(writer)
    assert file.write(b"second\n") == 7
    assert file.write(b"third\n") == 6
    assert drain(reader).startswith(b"first\nx")
    file.write(b"fourth\n")
    assert drain(reader) == b"fourth\n"
    assert file.take_num_lost() == 2
    assert file.take_num_lost() == 0


def test_a_line_that_was_begun_does_not_run_into_the_next(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    file = GuardedFile(writer)
    assert file.write(b"y" * 10**6) == 10**6
    drain(reader)
    file.write(b"next\n")
    assert drain(reader) == b"\nnext\n"
    assert file.take_num_lost() == 1


def test_a_reader_that_has_gone_is_no_error(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.close(reader)
    file = GuardedFile(writer)
    assert file.write(b"line\n") == 5
    assert file.take_num_lost() == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_no_error_and_the_log_says_later_what_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    stream = io.TextIOWrapper(GuardedFile(full), write_through=True)
    monkeypatch.setattr(sys, "stderr", stream)
    handler = make_handler()
    record = logging.LogRecord("quire", logging.WARNING, "", 0, "said", None, None)
    for _ in range(3):
        handler.emit(record)
    fixed = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(fixed, full)
    handler.emit(record)
    handler.emit(record)
    for fd in (full, fixed):
        os.close(fd)
    lost, *said = (tmp_path / "log").read_text().splitlines()
    assert "3 times" in lost
    assert [line.endswith("said") for line in said] == [True, True]
    assert take_num_lost(stream) == 0
    assert take_num_lost(io.StringIO()) == 0


@pytest.mark.parametrize("closed", [(), (0,), (1,), (2,), (0, 1, 2)])
def test_a_standard_file_that_is_closed_becomes_the_null_device(closed: tuple[int, ...], tmp_path: Path) -> None:
    report = tmp_path / "report"
    shell = " ".join(["exec", '"$@"', *(f"{fd}>&-" for fd in closed)])
    command = ["bash", "-c", shell, "sh", sys.executable, "-c", GUARD, str(report)]
    ended = subprocess.run(command, stdin=subprocess.PIPE, capture_output=True, cwd=Path(__file__).parents[2])
    assert ended.returncode == 0, ended.stderr
    socket_fd, are_null = json.loads(report.read_text())
    assert socket_fd > 2
    assert are_null == [fd in closed for fd in range(3)]
    assert ended.stdout == (b"" if 1 in closed else b"out\n")
    assert ended.stderr == (b"" if 2 in closed else b"err")
