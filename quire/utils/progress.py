"""A progress bar on standard error that appears only on a terminal, and only when the work takes a while."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

SHOW_AFTER_SECONDS = 1.0


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
