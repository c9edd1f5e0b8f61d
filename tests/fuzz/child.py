"""Cases that run in a process of their own, so that a crash, an endless loop or the end of memory is a finding.

The process is used for many cases. It is told a number or a name on each line of its input, and answers with one line.
"""

from __future__ import annotations

import importlib
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from tests.fuzz.harness import Attack

ROOM_BYTES = 2**30
"""What a case may take of address space, beyond what the process has once it has tried one."""
DEADLINE = 90.0
"""Seconds for a case; it only guards against one that never ends."""


class Child:
    """case: "module:function" of a function that takes a line and raises for a broken promise."""

    def __init__(self, case: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.child", case],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, line: str) -> None:
        """Raises AssertionError with what the process says of the case, or how it ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], DEADLINE)
        assert ready, "the case does not end"
        answer = self._process.stdout.readline().strip()
        if not answer:
            status = self._process.wait()
            raise AssertionError(f"the process ended: {signal.Signals(-status).name if status < 0 else status}")
        assert answer == "ok", answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def cases_of(case: str) -> Iterator[Attack]:
    child = Child(case)

    def attack(rng: Random) -> None:
        child.run(str(rng.getrandbits(64)))

    try:
        yield attack
    finally:
        child.close()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    module, _, name = sys.argv[1].partition(":")
    case = getattr(importlib.import_module(module), name)
    is_first = True
    for line in sys.stdin:
        try:
            case(line.rstrip("\n"))
            answer = "ok"
        except BaseException as error:
            answer = " ".join(f"{type(error).__name__}: {error}".split())[:2000]
        if is_first:  # what is imported on the way is there now
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + ROOM_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            is_first = False
        answers.write(answer + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
