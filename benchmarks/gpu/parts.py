"""The parts of a run: processes of their own, each ended when its time is over, so that one that fails or hangs costs
no other more than that time."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Commands run here: tests are named from the root of the tree."""
GRACE_SECONDS = 3.0
"""From asking a part's processes to end until those that did not are killed; taken from the part's time."""
KILLED_SECONDS = 1.0
"""To wait for killed processes: one that the driver holds in the kernel ends later, and the run goes on without it."""
TAIL_CHARACTERS = 3000
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Part:
    """A command of a run. name: on the command line. command: {out} is the file for results, {folder} the place of
    logs. seconds: its time. least: it does not begin with less time left. rehearsal: further words without a card;
    rehearsed: the command there, if another. environment: variables."""

    name: str
    command: tuple[str, ...]
    seconds: float
    rehearsal: tuple[str, ...] = ("--tiny",)
    rehearsed: tuple[str, ...] | None = None
    least: float = GRACE_SECONDS
    environment: Mapping[str, str] = field(default_factory=dict)

    def for_rehearsal(self, seconds: float) -> Part:
        """The same where there is no card: in the interpreter, with tiny shapes, for at most `seconds`."""
        command = self.command if self.rehearsed is None else self.rehearsed
        return replace(self, command=(*command, *self.rehearsal), seconds=seconds, least=GRACE_SECONDS)


@dataclass(frozen=True, slots=True)
class Outcome:
    """status: "done", "failed" (it ended with another status than 0), "out of time" or "not begun". tail: the end of
    the log of one that is not done."""

    name: str
    status: str
    seconds: float
    tail: str = ""


def run_part(part: Part, logs: Path, results: Path, seconds: float, environment: Mapping[str, str]) -> Outcome:
    """Run a part for at most its own time and at most `seconds`. logs: folder for what it prints. results: the file for
    records."""
    limit = min(part.seconds, seconds)
    if limit <= part.least:
        return Outcome(part.name, "not begun", 0.0)
    others, started, log = set(descendants(os.getpid())), time.monotonic(), logs / f"{part.name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [word.replace("{out}", str(results)).replace("{folder}", str(logs)) for word in part.command],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=ROOT,
            env={**os.environ, **environment, **part.environment},
        )
    try:
        process.wait(limit - GRACE_SECONDS)
        status = "failed" if process.returncode else "done"
    except subprocess.TimeoutExpired:
        status = "out of time"
    _end_all(process, started + limit - KILLED_SECONDS, others)
    tail = "" if status == "done" else log.read_text(errors="replace")[-TAIL_CHARACTERS:]
    return Outcome(part.name, status, time.monotonic() - started, tail)


def _end_all(process: subprocess.Popen[bytes], until: float, others: set[int]) -> None:
    """Ask whatever a part has left running to end, and kill at `until` what did not. That includes processes in
    sessions of their own, such as the children of an engine: they would hold the card's memory. others: what ran before
    the part."""

    def left() -> list[int]:
        process.poll()
        return [pid for pid in descendants(os.getpid()) if pid not in others]

    for pid in left():
        _signal(pid, signal.SIGTERM)
    while left() and time.monotonic() < until:
        time.sleep(0.05)
    for pid in left():
        _signal(pid, signal.SIGKILL)
    try:
        process.wait(KILLED_SECONDS)
    except subprocess.TimeoutExpired:
        return


def descendants(pid: int) -> list[int]:
    """Children of a process, their children and so on, without those that have ended and wait to be asked for."""
    children: dict[int, list[int]] = {}
    for child, parent in _running():
        children.setdefault(parent, []).append(child)
    found, to_visit = [], [pid]
    while to_visit:
        below = children.get(to_visit.pop(), [])
        found += below
        to_visit += below
    return found


def _running() -> Iterator[tuple[int, int]]:
    """(process, its parent) of every live process, from Linux's /proc."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            except (OSError, ValueError):  # it has just ended
                continue
            if state != "Z":
                yield int(entry.name), int(parent)


def adopt_orphans() -> None:
    """From now on the children of a process that ends become this process's (Linux): `run_part` finds and ends them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _signal(pid: int, sign: signal.Signals) -> None:
    try:
        os.kill(pid, sign)
    except ProcessLookupError:
        return


def python(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a module."""
    return (sys.executable, "-m", module, *arguments)
