"""What the processes in front of one engine know of it and of each other, as shared numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from quire.clock import Clock, SystemClock
from quire.engine.request_part import decayed
from quire.utils.heartbeat import SILENCE_LIMIT
from quire.utils.shared_numbers import Numbers

T = TypeVar("T", bound=float)


class _Number(Generic[T]):
    """An attribute that is one of the common numbers."""

    def __init__(self, place: int, kind: Callable[[float], T]) -> None:
        self._place, self._kind = place, kind

    def __get__(self, state: EngineState, owner: type[EngineState]) -> T:
        return self._kind(state.common[self._place])

    def __set__(self, state: EngineState, value: T) -> None:
        state.common[self._place] = value


@dataclass(slots=True)
class ControlState:
    """What a front end knows of the engine without asking. num_running: requests that it computed last."""

    is_asleep: bool = False
    sleep_level: int = 0
    pauses: bool = False
    refuses_new: bool = False
    num_running: int = 0


class EngineState:
    """Of the engine, for all processes. The parent writes the first five; the others stand for `ControlState`."""

    num_ticks = _Number(0, int)
    """Grows while the parent lives and gets on."""
    silence = _Number(1, float)
    is_restarting = _Number(2, bool)
    num_restarts = _Number(3, int)
    num_running = _Number(4, int)
    """Requests that the engine computes."""
    is_asleep = _Number(5, bool)
    sleep_level = _Number(6, int)
    pauses = _Number(7, bool)
    refuses_new = _Number(8, bool)

    def __init__(self, numbers: Numbers) -> None:
        self.common = numbers.allocate(9).common


class Loads:
    """What each process has to do."""

    _NUM_CELLS = 8
    _UNFINISHED, _PENDING, _TOKENS, _PROGRESS, _PROGRESS_AT, _CLOSED, _PID, _BEAT = range(_NUM_CELLS)

    def __init__(self, numbers: Numbers, clock: Clock) -> None:
        self._cells = numbers.allocate(self._NUM_CELLS)
        self._now = clock.now

    def publish(self, num_unfinished: int, num_pending: int, num_tokens: int, progress: tuple[float, float]) -> None:
        """Of this process. num_unfinished, num_pending, num_tokens: as in AsyncLLM. progress: `Backlog.progress`."""
        own = self._cells.own
        own[self._UNFINISHED], own[self._PENDING], own[self._TOKENS] = num_unfinished, num_pending, num_tokens
        own[self._PROGRESS], own[self._PROGRESS_AT] = progress

    def publish_connections(self, num_closed: int) -> None:
        """Of this process: how many of the connections that it was given are closed. Also says that it gets on."""
        own = self._cells.own
        own[self._CLOSED], own[self._BEAT] = num_closed, self._now()

    def take_slot(self, slot: int, pid: int) -> None:
        """A new process has the slot: it has nothing to do."""
        cells = self._cells.slots[slot]
        for place in range(self._NUM_CELLS):
            cells[place] = 0.0
        cells[self._PID], cells[self._BEAT] = pid, self._now()

    def by_load(self, num_given: Mapping[int, int]) -> list[int]:
        """Slots of processes, the one with the fewest open connections first; those that have not got on for
        SILENCE_LIMIT seconds come last. num_given: connections that the process of a slot was given."""

        def load(slot: int) -> tuple[bool, float]:
            cells = self._cells.slots[slot]
            return self._now() - cells[self._BEAT] >= SILENCE_LIMIT, num_given[slot] - cells[self._CLOSED]

        return sorted(num_given, key=load)

    @property
    def pids(self) -> list[int]:
        """Of all processes that have begun, the parent included."""
        return [int(slot[self._PID]) for slot in self._cells.slots if slot[self._PID]]

    @property
    def num_unfinished(self) -> int:
        return int(self._cells.total(self._UNFINISHED))

    @property
    def num_pending(self) -> int:
        return int(self._cells.total(self._PENDING))

    @property
    def num_tokens(self) -> int:
        return int(self._cells.total(self._TOKENS))

    @property
    def queue_seconds(self) -> float:
        """As Backlog.seconds, of all processes."""
        now = self._now()
        rate = sum(decayed((slot[self._PROGRESS], slot[self._PROGRESS_AT]), now) for slot in self._cells.slots)
        return self.num_tokens / rate if rate else math.inf


class SharedState:
    """Every process of a server makes one before it asks `numbers` for anything else."""

    def __init__(self, numbers: Numbers, clock: Clock | None = None) -> None:
        """clock: the same scale in all processes."""
        self.engine = EngineState(numbers)
        self.loads = Loads(numbers, clock or SystemClock())
