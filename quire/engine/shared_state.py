"""Shared numbers: the engine's state and each process's load."""

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
    def __init__(self, place: int, kind: Callable[[float], T]) -> None:
        self._place, self._kind = place, kind

    def __get__(self, state: EngineState, owner: type[EngineState]) -> T:
        return self._kind(state.common[self._place])

    def __set__(self, state: EngineState, value: T) -> None:
        state.common[self._place] = value


@dataclass(slots=True)
class ControlState:
    """Front end's knowledge of the engine: sleep, pause and load. num_running, num_running_live: requests, and those
    outside the background, in the last snapshot."""

    is_asleep: bool = False
    sleep_level: int = 0
    pauses: bool = False
    refuses_new: bool = False
    num_running: int = 0
    num_running_live: int = 0


class EngineState:
    num_ticks = _Number(0, int)
    """Counter that grows while the parent makes progress; other processes watch it."""
    silence = _Number(1, float)
    is_restarting = _Number(2, bool)
    num_restarts = _Number(3, int)
    num_running = _Number(4, int)
    is_asleep = _Number(5, bool)
    sleep_level = _Number(6, int)
    pauses = _Number(7, bool)
    refuses_new = _Number(8, bool)
    stopped_code = _Number(9, int)
    """`EngineClient.stopped` + 2; 0: no process is stopped."""
    num_running_live = _Number(10, int)
    """Running requests outside the background, in the last snapshot."""

    def __init__(self, numbers: Numbers) -> None:
        self.common = numbers.allocate(11).common


class Loads:
    """Load (requests, tokens, connections) of each server process."""

    _NUM_CELLS = 9
    _UNFINISHED, _PENDING, _LIVE, _TOKENS, _PROGRESS, _PROGRESS_AT, _CLOSED, _PID, _BEAT = range(_NUM_CELLS)

    def __init__(self, numbers: Numbers, clock: Clock) -> None:
        self._cells = numbers.allocate(self._NUM_CELLS)
        self._now = clock.now

    def publish(
        self, num_unfinished: int, num_pending: int, num_live: int, num_tokens: int, progress: tuple[float, float]
    ) -> None:
        """Publish this process's load. num_unfinished, num_pending, num_tokens: see AsyncLLM. num_live: pending
        requests outside the background. progress: `Backlog.progress`."""
        own = self._cells.own
        own[self._UNFINISHED], own[self._PENDING], own[self._LIVE] = num_unfinished, num_pending, num_live
        own[self._TOKENS] = num_tokens
        own[self._PROGRESS], own[self._PROGRESS_AT] = progress

    def publish_connections(self, num_closed: int) -> None:
        """Publish this process's number of closed connections and its progress."""
        own = self._cells.own
        own[self._CLOSED], own[self._BEAT] = num_closed, self._now()

    def take_slot(self, slot: int, pid: int) -> None:
        """Reset a slot's numbers for a new process with this pid. slot: index of a process."""
        cells = self._cells.slots[slot]
        for place in range(self._NUM_CELLS):
            cells[place] = 0.0
        cells[self._PID], cells[self._BEAT] = pid, self._now()

    def by_load(self, num_given: Mapping[int, int]) -> list[int]:
        """Slots ordered by open connections, fewest first; processes silent for SILENCE_LIMIT seconds come last.
        num_given: connections given to each slot's process."""

        def load(slot: int) -> tuple[bool, float]:
            cells = self._cells.slots[slot]
            return self._now() - cells[self._BEAT] >= SILENCE_LIMIT, num_given[slot] - cells[self._CLOSED]

        return sorted(num_given, key=load)

    @property
    def pids(self) -> list[int]:
        """Ids of all started processes, the parent included."""
        return [int(slot[self._PID]) for slot in self._cells.slots if slot[self._PID]]

    @property
    def num_unfinished(self) -> int:
        return int(self._cells.total(self._UNFINISHED))

    @property
    def num_pending(self) -> int:
        return int(self._cells.total(self._PENDING))

    @property
    def num_live(self) -> int:
        return int(self._cells.total(self._LIVE))

    @property
    def num_tokens(self) -> int:
        return int(self._cells.total(self._TOKENS))

    @property
    def queue_seconds(self) -> float:
        """`Backlog.seconds` over all processes."""
        now = self._now()
        rate = sum(decayed((slot[self._PROGRESS], slot[self._PROGRESS_AT]), now) for slot in self._cells.slots)
        return self.num_tokens / rate if rate else math.inf


class SharedState:
    """Memory that all API processes of a server map: loads, engine state, clock. Every process must make it before it
    asks `numbers` for anything else."""

    def __init__(self, numbers: Numbers, clock: Clock | None = None) -> None:
        """Shared state over `numbers`. clock: one scale for all processes."""
        self.engine = EngineState(numbers)
        self.loads = Loads(numbers, clock or SystemClock())
