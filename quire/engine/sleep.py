"""Sleep and pause: ways in which an engine computes nothing for a while.

Sleep: an idle engine releases its memory, and allocates it again without a restart.

Level 1 keeps the weights (in host memory, where they were on a device), level 2 drops them: they are loaded again. The
KV cache is given back by both, and what was cached is forgotten. The weights may wake up alone, to be there before the
KV cache takes its memory.

Pause: the engine computes nothing new until it is resumed, and what it has computed stays. `new` holds requests that
have not started, while running ones go on to their end; `all` also stops the running ones, which keep their blocks. The
tokens are the same as without a pause: each depends on its own request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from quire.errors import EngineAsleepError, UserError
from quire.executors.interface import Executor
from quire.kv_cache.stats import EngineStats

LEVELS = {"1": 1, "2": 2}
PARTS = ("weights", "kv_cache")
"""What sleeps, in the order in which it wakes up."""
SCOPES = ("new", "all")
"""What a pause stops."""


def part_of(tags: Collection[str] | None) -> str:
    """The part of the engine that the tags of a wake-up mean, "" for all. Raises UserError for other tags."""
    for tag in tags or ():
        if tag not in PARTS:
            raise UserError(f"tags must be among {', '.join(PARTS)}, not {tag!r}", param="tags")
    return "" if not tags or set(tags) == set(PARTS) else next(iter(tags))


class Cache(Protocol):
    def reset_prefix_cache(self) -> int: ...


class Requests(Protocol):
    """What must be over before the engine sleeps."""

    @property
    def kv(self) -> Cache: ...

    @property
    def has_requests(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def forget_rows(self) -> None: ...


class Sleep:
    """level: 0 awake, 1 or 2 asleep."""

    def __init__(self, executor: Executor, scheduler: Requests, finish_transfers: Callable[[], bool]) -> None:
        """finish_transfers: ends the transfers of the KV connector; returns whether nothing is left."""
        self.level = 0
        self._has_weights = True
        self._executor = executor
        self._scheduler = scheduler
        self._finish_transfers = finish_transfers

    def check_awake(self) -> None:
        """Raise EngineAsleepError, when it sleeps."""
        if self.level:
            raise EngineAsleepError("the engine is asleep: wake it up first (wake_up)")

    def fall_asleep(self, level: str) -> None:
        """Sleep at `level`, "1" or "2". An engine asleep at level 1 may go to level 2. Raises UserError, having changed
        nothing, while requests live or prefixes are registered, and InsufficientMemoryError, awake but for the prefix
        cache, when the host has no room for the weights."""
        if level not in LEVELS:
            raise UserError(f"the level of sleep must be 1 or 2, not {level!r}", param="level")
        wanted = LEVELS[level]
        if wanted <= self.level and not self._has_weights:
            return
        if not self.level:
            self._leave_the_cache()
        self._executor.sleep(wanted)
        self._scheduler.forget_rows()
        self.level, self._has_weights = max(wanted, self.level), False

    def wake_up(self, part: str = "") -> None:
        """Be as before, with an empty cache. part: "weights" brings back these alone, and "kv_cache" the rest behind
        them. Raises what loading and allocating raise; then it is still asleep. Raises UserError for another part, and
        for "kv_cache" while the weights sleep."""
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
    """scope: "new", "all", or "" while the engine is not paused. stops_all: whether no step may be planned."""

    def __init__(self, scheduler: Held) -> None:
        self.scope = ""
        self.stops_all = False
        self._scheduler = scheduler

    @property
    def level(self) -> int:
        """0 while the engine is not paused, 1 for the scope "new", 2 for "all"."""
        return SCOPES.index(self.scope) + 1 if self.scope else 0

    def hold(self, scope: str) -> None:
        """Pause, or change the scope of a pause. Raises UserError for another scope than SCOPES."""
        if scope not in SCOPES:
            raise UserError(f"the scope of a pause must be one of {', '.join(SCOPES)}, not {scope!r}", param="scope")
        self.scope, self.stops_all = scope, scope == "all"
        self._scheduler.hold_new(True)

    def end(self) -> None:
        """Go on. Idempotent."""
        self.scope, self.stops_all = "", False
        self._scheduler.hold_new(False)
