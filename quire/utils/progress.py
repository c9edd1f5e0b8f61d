"""Progress of work that takes a while, on standard error: a bar on a terminal, lines of the log elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

from quire.clock import Clock, SystemClock
from quire.logging import note

SHOW_AFTER_SECONDS = 1.0
LOG_EVERY_SECONDS, LOG_EVERY_SHARE = 10.0, 0.1


class ProgressBar:
    """Counts up to `total`. Silent when standard error is no terminal, when not `enabled`, and in the first second."""

    def __init__(self, description: str, total: int, *, enabled: bool = True) -> None:
        self._description = description
        self._total = total
        self._enabled = enabled and sys.stderr.isatty()
        self._started = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def update(self, completed: int, note: str = "") -> None:
        """`completed` of `total` are done; `note` stands at the end of the line."""
        if not self._enabled or (self._bar is None and time.monotonic() - self._started < SHOW_AFTER_SECONDS):
            return
        if self._bar is None:
            self._open()
        self._bar.update(self._task, completed=completed, note=note)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: type[BaseException] | None, _e: BaseException | None, _tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _open(self) -> None:
        # Imported here: most work ends before there is anything to show.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task(self._description, total=self._total, note="")
        self._bar.start()


class ProgressLog:
    """The progress of long work as lines of the log, where standard error is no terminal: one every 10 s or 10 % of the
    work, whichever comes first, and none in the first second."""

    def __init__(self, description: str, total: int, clock: Clock | None = None) -> None:
        self._description, self._total = description, total
        self._enabled = not sys.stderr.isatty()
        self._clock = clock or SystemClock()
        self._started = self._logged = self._clock.now()
        self._completed = 0

    def update(self, completed: int) -> None:
        """`completed` of `total` are done."""
        now = self._clock.now()
        is_due = now - self._logged >= LOG_EVERY_SECONDS
        is_due |= completed - self._completed >= LOG_EVERY_SHARE * self._total
        if not self._enabled or not is_due or now - self._started < SHOW_AFTER_SECONDS:
            return
        self._logged, self._completed = now, completed
        share = 100 * completed // max(self._total, 1)
        note(__name__, "%s: %d of %d (%d %%)", self._description, completed, self._total, share)
