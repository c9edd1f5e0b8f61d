"""Sleep and pause of an engine. Sleep frees memory (`Executor.sleep`). A pause keeps the engine's state: scope `new`
holds unstarted requests; `all` also suspends running ones, which keep their blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from quire.errors import EngineAsleepError, UserError
from quire.executors.interface import Executor
from quire.kv_cache.stats import EngineStats

LEVELS = {"1": 1, "2": 2}
PARTS = ("weights", "kv_cache")
"""Parts of an engine that sleep, in their order of waking."""
SCOPES = ("new", "all")


def part_of(tags: Collection[str] | None) -> str:
    """Part that the tags of a wake-up name, "" for all. Raises UserError for other tags."""
    for tag in tags or ():
        if tag not in PARTS:
            raise UserError(f"tags must be among {', '.join(PARTS)}, not {tag!r}", param="tags")
    return "" if not tags or set(tags) == set(PARTS) else next(iter(tags))


class Cache(Protocol):
    def reset_prefix_cache(self) -> int: ...


class Requests(Protocol):
    """Part of the scheduler (requests, registered prefixes) that Sleep and Pause use."""

    @property
    def kv(self) -> Cache: ...

    @property
    def has_requests(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def forget_rows(self, *, adapters: bool) -> None: ...


class Sleep:
    """Sleeping and waking of an engine core. level: 0 awake, 1 or 2 asleep. The core's control calls use it."""

    def __init__(self, executor: Executor, scheduler: Requests, finish_transfers: Callable[[], bool]) -> None:
        """finish_transfers: completes the KV connector's transfers; returns whether nothing is left."""
        self.level = 0
        self._has_weights = True
        self._executor = executor
        self._scheduler = scheduler
        self._finish_transfers = finish_transfers

    def check_awake(self) -> None:
        if self.level:
            raise EngineAsleepError("the engine is asleep: wake it up first (wake_up)")

    def fall_asleep(self, level: str) -> None:
        """Sleep at `level`, "1" or "2"; level 1 may become level 2. Raises UserError while requests live or prefixes
        are registered, and InsufficientMemoryError if the host lacks memory for the weights."""
        if level not in LEVELS:
            raise UserError(f"the level of sleep must be 1 or 2, not {level!r}", param="level")
        wanted = LEVELS[level]
        if wanted <= self.level and not self._has_weights:
            return
        if not self.level:
            self._leave_the_cache()
        self._executor.sleep(wanted)
        self._scheduler.forget_rows(adapters=level == "2")
        self.level, self._has_weights = max(wanted, self.level), False

    def wake_up(self, part: str = "") -> None:
        """Restore the engine with an empty cache. part: "weights" restores only these, "kv_cache" the rest after them.
        Raises the errors of loading and allocating, still asleep, and UserError for another part or for "kv_cache"
        before the weights."""
        if part not in ("", *PARTS):
            raise UserError(f"the part to wake up must be one of {', '.join(PARTS)}, not {part!r}", param="tags")
        if not self.level:
            return
        if part == "weights":
            self._executor.wake_weights()
            self._has_weights = True
            return
        if part and not self._has_weights:
            raise UserError("the weights sleep: wake them up before the kv_cache", param="tags")
        self._executor.wake_up()
        self.level, self._has_weights = 0, True

    def _leave_the_cache(self) -> None:
        scheduler, stats = self._scheduler, self._scheduler.stats()
        if scheduler.has_requests:
            raise UserError(
                f"the engine cannot sleep while requests live: {stats.num_running} run and {stats.num_waiting} wait"
            )
        if stats.num_registered_blocks:
            raise UserError("the engine cannot sleep while prefixes are registered: unregister them first")
        if not self._finish_transfers():
            raise UserError("the engine cannot sleep yet: KV blocks are still on their way")
        scheduler.kv.reset_prefix_cache()


class Held(Protocol):
    def hold_new(self, is_held: bool) -> None: ...


class Pause:
    """Pause of an engine core. scope: "new", "all", or "" while not paused. stops_all: True if no step may be
    planned."""

    def __init__(self, scheduler: Held) -> None:
        self.scope = ""
        self.stops_all = False
        self._scheduler = scheduler

    @property
    def level(self) -> int:
        """0 if not paused, 1 for the scope "new", 2 for "all"."""
        return SCOPES.index(self.scope) + 1 if self.scope else 0

    def hold(self, scope: str) -> None:
        """Pause, or change the scope. Raises UserError for an unknown scope."""
        if scope not in SCOPES:
            raise UserError(f"the scope of a pause must be one of {', '.join(SCOPES)}, not {scope!r}", param="scope")
        self.scope, self.stops_all = scope, scope == "all"
        self._scheduler.hold_new(True)

    def end(self) -> None:
        self.scope, self.stops_all = "", False
        self._scheduler.hold_new(False)
