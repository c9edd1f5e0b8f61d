"""The parts of a run: processes of their own, each ended when its time is over, so that one that fails or hangs costs
no other more than that time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

GRACE_SECONDS = 5.0
"""From being asked to end to being ended."""
TAIL_CHARACTERS = 3000


@dataclass(frozen=True, slots=True)
class Part:
    """name: as on the command line. commands: run side by side; in them {out} is the file for results, {folder} the
    place of others, {name} the command's own. seconds: after which they are ended. rehearsal: what each command takes
    besides where there is no card."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    seconds: float
    rehearsal: tuple[str, ...] = ("--tiny",)

    def rehearsed(self, seconds: float) -> Part:
        """The same in the interpreter, with tiny shapes."""
        commands = tuple((*words, *self.rehearsal) for words in self.commands)
        return replace(self, commands=commands, seconds=seconds)


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


def run_part(part: Part, out: Path, seconds: float, environment: Mapping[str, str] | None = None) -> Outcome:
    """Run it for at most its own time and at most `seconds`. out: folder for results and logs."""
    limit = min(part.seconds, seconds)
    if limit <= GRACE_SECONDS:
        return Outcome(part.name, "not begun", 0.0)
    started = time.monotonic()
    running: list[tuple[subprocess.Popen[bytes], Path]] = []
    for number, command in enumerate(part.commands):
        log = out / f"{part.name}-{number}.log"
        words = [word.format(out=out / "results.jsonl", folder=out, name=f"{part.name}-{number}") for word in command]
        with log.open("wb") as file:
            process = subprocess.Popen(
                words,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
        running.append((process, log))
    in_time = [_wait(process, started + limit - GRACE_SECONDS) for process, _ in running]
    codes = tuple(process.returncode for process, _ in running)
    status = "out of time" if not all(in_time) else "failed" if any(codes) else "done"
    failed = [log for (process, log), each in zip(running, in_time, strict=True) if process.returncode or not each]
    tail = "\n".join(log.read_text(errors="replace")[-TAIL_CHARACTERS:] for log in failed)
    return Outcome(part.name, status, time.monotonic() - started, codes, tail)


def _wait(process: subprocess.Popen[bytes], until: float) -> bool:
    """Whether it ended by itself in time. Else it and its children are ended."""
    try:
        process.wait(max(0.0, until - time.monotonic()))
        return True
    except subprocess.TimeoutExpired:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            _signal(process, sign)
            try:
                process.wait(GRACE_SECONDS / 2)
                break
            except subprocess.TimeoutExpired:
                continue
        _signal(process, signal.SIGKILL)
        return False


def _signal(process: subprocess.Popen[bytes], sign: signal.Signals) -> None:
    """To the whole group: a test runner's or an engine's children must not hold the card any longer."""
    try:
        os.killpg(process.pid, sign)
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
