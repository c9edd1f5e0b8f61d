"""Engine processes that die, hang or take their time to start when a test has said so, and not before.

The processes look into the directory that FATES names, which they inherit. An executor made here runs the plans by
another one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.config.engine import EngineConfig
from quire.executors.choice import make_executor
from quire.step import StepPlan, StepResult

FATES = "FATES_OF_ENGINES"


class Fates:
    """The test's side. The processes that are started from now on know it."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self._directory = path
        patch.setenv(FATES, str(path))

    def are(self, *fates: tuple[str, int]) -> None:
        """How engines end, one after the other, and after how many more steps: "die", "stop" (the whole process),
        "lock" (its main thread), "rank dies", "rank stops". The first one is that of the engine that runs."""
        written = self._directory / "new"
        written.write_bytes(msgspec.json.encode(fates))
        written.rename(self._directory / "fates")

    @property
    def num_left(self) -> int:
        try:
            return len(msgspec.json.decode((self._directory / "fates").read_bytes()))
        except FileNotFoundError:
            return 0

    def close_gate(self) -> None:
        """No engine starts."""
        (self._directory / "gate").touch()

    def open_gate(self) -> None:
        (self._directory / "gate").unlink()


class FatedExecutor:
    """An `Executor` by another one."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._directory = Path(os.environ[FATES])
        self._fate: tuple[str, int] | None = None
        while (self._directory / "gate").exists():
            time.sleep(0.01)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        if self._fate is None:
            self._fate = self._take()
        if self._fate is not None:
            kind, num_steps = self._fate
            if num_steps == 0:
                self._meet(kind)
            self._fate = kind, num_steps - 1
        return self._executor.execute(plan)  # type: ignore[no-any-return]

    def _take(self) -> tuple[str, int] | None:
        file = self._directory / "fates"
        if not file.exists():
            return None
        fate, *others = msgspec.json.decode(file.read_bytes(), type=list[tuple[str, int]])
        file.write_bytes(msgspec.json.encode(others)) if others else file.unlink()
        return fate

    def _meet(self, kind: str) -> None:
        match kind:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "lock":
                threading.Event().wait()
            case "rank dies" | "rank stops":
                number = signal.SIGKILL if kind == "rank dies" else signal.SIGSTOP
                os.kill(self._executor._workers.pids[1], number)
            case _:
                raise AssertionError(kind)


def fated(config: EngineConfig) -> FatedExecutor:
    """Over the real executor."""
    return FatedExecutor(make_executor(config))
