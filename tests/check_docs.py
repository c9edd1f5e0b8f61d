"""Run each command and each Python block of README.md and docs/ as a reader does.

    python -m tests.check_docs [DOCUMENT...]        (make check-docs)

Commands run in bash, two documents at a time, each in a directory of its own with files of the names that its commands
use (tests/document_files.py). A small model stands for each model that a reader would bring; one server of the bundled
model answers the calls of all documents. tests/cli/examples.py lists what is not run.
"""

from __future__ import annotations

import base64
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.architecture.source import ROOT
from tests.cli.examples import ADDRESS, DOCUMENTS, PYTHON_NOT_CHECKED, blocks, is_serve, text_of, why_not_run
from tests.document_files import link_files, write_files

SECONDS = 300.0
"""Time that a command may take."""
READY = re.compile(rb"http://[\w.]+:\d+")
ENOUGH = re.compile(rb"\x1b\[|KV")
"""Output of a command that goes on until it is interrupted, by which it has shown that it works."""


@dataclass(frozen=True)
class Outcome:
    """One command: its seconds, its seconds of the processor with its children's, and the reason of a failure."""

    command: str
    seconds: float
    processor_seconds: float
    failure: str | None


class Command:
    """A command of bash that runs in a directory, in a process group of its own."""

    def __init__(self, command: str, folder: Path, given: bytes = b"") -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"PATH": path, "HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}
        self._files = [folder / name for name in ("input", "output", "errors")]
        self._files[0].write_bytes(given)
        with self._files[0].open("rb") as entry, self._files[1].open("wb") as out, self._files[2].open("wb") as errors:
            self._process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=folder,
                env={**os.environ, **own, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"},
                stdin=entry,
                stdout=out,
                stderr=errors,
                start_new_session=True,
            )
        self.status: int | None = None
        self.processor_seconds = 0.0

    @property
    def output(self) -> bytes:
        return self._files[1].read_bytes()

    @property
    def errors(self) -> str:
        return self._files[2].read_text().strip()

    def _poll(self) -> bool:
        """Has it ended?"""
        if self.status is None:
            process, status, usage = os.wait4(self._process.pid, os.WNOHANG)
            if process:
                self.status = self._process.returncode = os.waitstatus_to_exitcode(status)
                self.processor_seconds = usage.ru_utime + usage.ru_stime
        return self.status is not None

    def wait(self, seconds: float = SECONDS) -> bool:
        """Wait for its end."""
        end = time.monotonic() + seconds
        while not self._poll() and time.monotonic() < end:
            time.sleep(0.01)
        return self._poll()

    def wait_for(self, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
        """Wait until its output has the pattern, or for its end."""
        end = time.monotonic() + SECONDS
        while not (found := pattern.search(self.output)) and not self._poll() and time.monotonic() < end:
            time.sleep(0.02)
        return found

    def end(self, sign: int) -> int | None:
        """Send its group a signal, and return its exit status. It is killed where it does not end."""
        if not self._poll():
            os.killpg(self._process.pid, sign)
            if not self.wait(30):
                os.killpg(self._process.pid, signal.SIGKILL)
                self.wait(30)
        return self.status


def serve(command: str, folder: Path, document: str) -> tuple[Command, str | None]:
    """Start a server, wait until it is ready, and stop it. A refusal whose words the document shows is no failure."""
    words = re.sub(r"--port \d+", "", command).partition("#")[0].rstrip()
    process = Command(f"exec {words} --port 0", folder)
    is_ready = process.wait_for(READY) is not None
    status = process.end(signal.SIGTERM)
    if not is_ready and process.errors and process.errors in text_of(document):
        return process, None
    return process, None if is_ready and status == 0 else f"exit {status}: {process.errors[-400:]}"


def run(command: str, folder: Path, document: str) -> tuple[Command, str | None]:
    """Run one command; the reason of a failure."""
    if is_serve(command):
        return serve(command, folder, document)
    process = Command(command, folder, b"/exit\n" if command.startswith("quire chat") else b"")
    if re.match(r"quire top (?!.*--once)", command):
        process.wait_for(ENOUGH)
        good = process.end(signal.SIGINT) in (0, 130)
    elif not process.wait():
        process.end(signal.SIGKILL)
        return process, f"no end within {SECONDS:.0f} s"
    else:
        good = process.status == 0
    return process, None if good else f"exit {process.status}: {process.errors[-400:]}"


def here(command: str, address: str) -> str:
    """The command with the address of the server that runs, in place of the usual one."""
    return re.sub(r"^quire top(?! +https?:)", f"quire top {address}", command.replace(ADDRESS, address))


def commands(document: str, folder: Path, address: str) -> Iterator[str]:
    """What a document shows, in its order; its Python blocks are one program, at the place of the last one."""
    if document == "README.md":  # where a reader would have the file
        yield "quire quantize path/to/directory --to q8_0 -o path/to/model.gguf"
    programs = [block for block in blocks(document) if block.language == "python"]
    for block in blocks(document):
        yield from (here(each, address) for each in block.commands() if why_not_run(each) is None)
        if document not in PYTHON_NOT_CHECKED and programs and block is programs[-1]:
            text = "\n".join(each.text for each in programs).replace(ADDRESS, address)
            text = text.replace(
                "base64,...", f"base64,{base64.b64encode((folder / 'photo.png').read_bytes()).decode()}"
            )
            (folder / "program.py").write_text(text)
            yield f"{shlex.quote(sys.executable)} program.py"


def check(document: str, files: Path, address: str) -> list[Outcome]:
    outcomes = []
    folder = files.with_name(document.replace("/", "-"))
    link_files(files, folder)
    for command in commands(document, folder, address):
        started = time.monotonic()
        process, failure = run(command, folder, document)
        outcome = Outcome(command, time.monotonic() - started, process.processor_seconds, failure)
        outcomes.append(outcome)
        seconds = f"{outcome.seconds:6.1f} s, processor {outcome.processor_seconds:5.1f} s"
        reason = f"\n          FAILED: {failure}" if failure is not None else ""
        print(f"{seconds}  {document}: {command.splitlines()[0][:90]}{reason}", flush=True)
    return outcomes


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Address of a server of the bundled model."""
    (folder / "home").mkdir(parents=True)
    process = Command("exec quire serve --kv-cache-memory 64MiB --port 0", folder)
    try:
        found = process.wait_for(READY)
        assert found, process.errors
        yield found[0].decode()
    finally:
        process.end(signal.SIGTERM)


def main(documents: list[str]) -> int:
    started = time.monotonic()
    outcomes: list[Outcome] = []
    longest_first = sorted(documents, key=lambda each: -sum(len(block.commands()) for block in blocks(each)))
    with TemporaryDirectory() as name, ThreadPoolExecutor(2) as threads:
        files = Path(name) / "files"
        write_files(files)
        with server(Path(name) / "server") as address:
            for found in threads.map(lambda each: check(each, files, address), longest_first):
                outcomes += found
    failed = sum(each.failure is not None for each in outcomes)
    used = os.times()
    print(
        f"==> {len(outcomes)} commands and programs, {failed} failed, {time.monotonic() - started:.0f} s, "
        f"{used.children_user + used.children_system:.0f} s of the processor"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or DOCUMENTS))
