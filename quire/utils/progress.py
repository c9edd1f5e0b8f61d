"""Progress of long work: bars on terminals and in notebooks, else log lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeAlias

from quire.clock import Clock, SystemClock
from quire.logging import note

SHOW_AFTER_SECONDS = 1.0
LOG_EVERY_SECONDS, LOG_EVERY_SHARE = 10.0, 0.1


MakeBar: TypeAlias = Callable[..., Any]
"""Constructor of a bar, with tqdm's `total`, `desc`, `dynamic_ncols`. Bars have `update`, `postfix` and `close`."""


class ProgressBar:
    """Counts up to `total`. make: constructor of a bar, used from the beginning; True: tqdm, on a terminal or in a
    notebook, after one second; False: no bar."""

    def __init__(self, description: str, total: int, *, make: bool | MakeBar = True) -> None:
        self._description = description
        self._total = total
        self._completed = 0
        self._started = time.monotonic()
        self._is_wanted = make is True and (sys.stderr.isatty() or _is_notebook())
        self._bar: Any = None if isinstance(make, bool) else self._made(make)

    def update(self, completed: int, note: str = "") -> None:
        """Show `completed` of `total`, with `note` at the line's end."""
        if self._bar is None:
            if not self._is_wanted or time.monotonic() - self._started < SHOW_AFTER_SECONDS:
                return
            from tqdm.auto import tqdm  # most work ends before there is anything to show

            self._bar = self._made(tqdm)
        self._bar.postfix = note
        self._bar.update(completed - self._completed)
        self._completed = completed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: type[BaseException] | None, _e: BaseException | None, _tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def _made(self, make: MakeBar) -> Any:
        return make(total=self._total, desc=self._description, dynamic_ncols=True)


def _is_notebook() -> bool:
    return type(sys.stderr).__module__.startswith("ipykernel.")


class ProgressLog:
    """Progress as log lines where standard error is no terminal: every 10 s or 10 % of the work, and none in the first
    second."""

    def __init__(self, description: str, total: int, clock: Clock | None = None) -> None:
        self._description, self._total = description, total
        self._enabled = not sys.stderr.isatty()
        self._clock = clock or SystemClock()
        self._started = self._logged = self._clock.now()
        self._completed = 0

    def update(self, completed: int) -> None:
        now = self._clock.now()
        is_due = now - self._logged >= LOG_EVERY_SECONDS
        is_due |= completed - self._completed >= LOG_EVERY_SHARE * self._total
        if not self._enabled or not is_due or now - self._started < SHOW_AFTER_SECONDS:
            return
        self._logged, self._completed = now, completed
        share = 100 * completed // max(self._total, 1)
        note(__name__, "%s: %d of %d (%d %%)", self._description, completed, self._total, share)
