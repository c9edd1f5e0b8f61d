"""The lines that a started server logs: its address, and the seconds of each phase of the start."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

from quire.version import __version__


class StartReport:
    """Collects the phases of a start, one after the other."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._rows: list[tuple[str, float]] = []

    def phase(self, name: str) -> None:
        """The phase that began with the one before ends now."""
        now = time.monotonic()
        self._rows.append((name, now - self._last))
        self._last = now

    def engine_phases(self, seconds: Mapping[str, float]) -> None:
        """The phases of the engine process."""
        self._rows += [(f"engine: {name}", value) for name, value in seconds.items()]

    def show(self, model_names: Sequence[str], url: str, backend: str) -> None:
        """Print one line with the address, what computes, and the table, to standard output."""
        total = time.monotonic() - self._start
        lines = [
            f"Quire {__version__} serves {', '.join(model_names)} on {url} (ready in {total:.1f} s)",
            f"  {backend}",
        ]
        lines += [f"  {seconds:7.2f} s  {name}" for name, seconds in self._rows]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
