"""Time as an argument: engine core and scheduler never read `time` themselves."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a monotonic scale with an arbitrary zero."""
        ...


class SystemClock:
    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """Clock that only `advance` moves, for tests and the simulator."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds} s")
        self._now += seconds
