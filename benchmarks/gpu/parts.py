"""The parts of a run: processes of their own, each ended when its time is over, so that one that fails or hangs costs
no other more than that time."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Commands run here: tests are named from the root of the tree."""
GRACE_SECONDS = 5.0
"""Of a part's time: from asking its processes to end until those that did not are killed."""
KILLED_SECONDS = 1.0
"""To wait for killed processes: one that the driver holds in the kernel ends later, and the run goes on without it."""
TAIL_CHARACTERS = 3000
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Part:
    """name: as on the command line. commands: run side by side; in them {out} is the file for results, {folder} the
    place of logs, {name} the command's own. seconds: after which they are ended. rehearsal: what each command takes
    besides where there is no card; rehearsed_commands: what runs there instead, if not None. rehearsal_seconds: the
    limit there."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    seconds: float
    rehearsal: tuple[str, ...] = ("--tiny",)
    rehearsed_commands: tuple[tuple[str, ...], ...] | None = None
    rehearsal_seconds: float = 200.0

    def rehearsed(self) -> Part:
        """The same where there is no card: in the interpreter, with tiny shapes."""
        commands = self.commands if self.rehearsed_commands is None else self.rehearsed_commands
        return replace(
            self, commands=tuple((*words, *self.rehearsal) for words in commands), seconds=self.rehearsal_seconds
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """status: "done", "failed" (a command ended with another status than 0), "out of time" or "not begun"."""

    name: str
    status: str
    seconds: float
    exit_codes: tuple[int | None, ...] = ()
    tail: str = ""

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "status": self.status,
            "seconds": round(self.seconds, 1),
            "exit_codes": list(self.exit_codes),
            "tail": self.tail,
        }


def run_part(
    part: Part, out: Path, seconds: float, environment: Mapping[str, str] | None = None, results: Path | None = None
) -> Outcome:
    """Run it for at most its own time and at most `seconds`. out: folder for logs. results: the file for records
    (results.jsonl in `out`)."""
    limit = min(part.seconds, seconds)
    if limit <= GRACE_SECONDS:
        return Outcome(part.name, "not begun", 0.0)
    others = set(descendants(os.getpid()))
    started = time.monotonic()
    running: list[tuple[subprocess.Popen[bytes], Path]] = []
    for number, command in enumerate(part.commands):
        log = out / f"{part.name}-{number}.log"
        places = {"out": results or out / "results.jsonl", "folder": out, "name": f"{part.name}-{number}"}
        with log.open("wb") as file:
            process = subprocess.Popen(
                [word.format(**places) for word in command],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
            )
        running.append((process, log))
    processes = [process for process, _ in running]
    in_time = _ended_by(processes, started + limit - GRACE_SECONDS)
    _end_all(processes, started + limit - KILLED_SECONDS, others)
    codes = tuple(process.returncode for process in processes)
    status = "out of time" if not all(in_time) else "failed" if any(codes) else "done"
    failed = [log for (process, log), each in zip(running, in_time, strict=True) if process.returncode or not each]
    tail = "\n".join(log.read_text(errors="replace")[-TAIL_CHARACTERS:] for log in failed)
    return Outcome(part.name, status, time.monotonic() - started, codes, tail)


def _ended_by(processes: Sequence[subprocess.Popen[bytes]], until: float) -> list[bool]:
    """Which of them ended by themselves before `until`."""
    ended = []
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
            ended.append(True)
        except subprocess.TimeoutExpired:
            ended.append(False)
    return ended


def _end_all(processes: Sequence[subprocess.Popen[bytes]], until: float, others: set[int]) -> None:
    """Ask whatever a part has left running to end, and kill at `until` what did not. That includes processes in
    sessions of their own, such as the children of an engine: they would hold the card's memory. others: what ran before
    the part."""

    def left() -> list[int]:
        for process in processes:
            process.poll()
        return [pid for pid in descendants(os.getpid()) if pid not in others]

    for pid in left():
        _signal(pid, signal.SIGTERM)
    while left() and time.monotonic() < until:
        time.sleep(0.05)
    for pid in left():
        _signal(pid, signal.SIGKILL)
    for process in processes:
        try:
            process.wait(KILLED_SECONDS / len(processes))
        except subprocess.TimeoutExpired:
            continue


def end_process(process: subprocess.Popen[str]) -> None:
    """End a process and all that it started, within a few seconds."""
    below = [process.pid, *descendants(process.pid)]
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for pid in below:
            _signal(pid, sign)
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


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
    return (sys.executable, "-m", module, *arguments)


def choose(parts: Sequence[Part], names: str | None) -> list[Part]:
    """Those named, with commas between, in their own order; all for None. Raises ValueError for a name that is none."""
    if names is None:
        return list(parts)
    wanted = names.split(",")
    unknown = sorted(set(wanted) - {part.name for part in parts})
    if unknown:
        raise ValueError(f"no part {', '.join(unknown)} (parts: {', '.join(part.name for part in parts)})")
    return [part for part in parts if part.name in wanted]
