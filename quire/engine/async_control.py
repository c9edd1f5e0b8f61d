"""The part of AsyncLLM that controls a running engine: figures, the prefix cache, pause and sleep."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

from quire.engine.messages import CallResult
from quire.engine.shared_state import EngineState
from quire.engine.sleep import part_of
from quire.errors import EngineAsleepError, UserError
from quire.scheduler.snapshot import KVSnapshot
from quire.stats import EngineStats

MODES = ("abort", "wait", "keep")
"""What a pause does to requests that run."""
POLL_SECONDS = 0.01
"""How often a caller that waits for the end of requests looks."""


@dataclass(slots=True)
class ControlState:
    """What a front end knows of the engine without asking. num_running: requests that it computed last."""

    is_asleep: bool = False
    sleep_level: int = 0
    pauses: bool = False
    refuses_new: bool = False
    num_running: int = 0


class AsyncControl(ABC):
    """Part of AsyncLLM. The errors are those of `AsyncLLM.call`."""

    _control: ControlState | EngineState

    @property
    def sleep_level(self) -> int:
        """The level at which a front end has sent the engine to sleep; 0 while it is awake."""
        return self._control.sleep_level

    @property
    def pauses(self) -> bool:
        """Whether a front end has paused the engine."""
        return self._control.pauses

    @property
    def refuses_new(self) -> bool:
        """Whether the pause keeps no requests ("abort", "wait"): a server refuses new ones instead of holding them."""
        return self._control.refuses_new

    @abstractmethod
    async def ask(self, method: str, argument: str = "") -> CallResult:
        """As AsyncLLM.ask."""

    async def stats(self) -> EngineStats:
        """A fresh snapshot."""
        value = (await self.ask("stats")).value
        assert isinstance(value, EngineStats)
        return value

    async def kv_snapshot(self) -> KVSnapshot:
        """Every block and every live request, as of the next turn of the core. `request_id` is the engine's own key:
        the caller's id, "#" and a number that no other request has."""
        snapshot = (await self.ask("kv_snapshot")).kv
        assert snapshot is not None
        return snapshot

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> int:
        """Forget every cached prefix; returns how many blocks held one. The arguments: as of LLM.reset_prefix_cache."""
        check_reset(reset_connector)
        return await self._count("reset_prefix_cache")

    async def pause(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Start no request until `resume`; new ones wait (a server refuses them unless mode is "keep"). mode: "abort"
        ends all requests with the finish reason "abort", "wait" returns when those that run have ended, "keep" stops
        them where they are, so that they go on at `resume` with the tokens that they would have had. clear_cache:
        forget cached prefixes as well, but with "keep".

        Raises UserError for another mode. Cancelled, it leaves the engine paused."""
        check_mode(mode)
        self._control.pauses, self._control.refuses_new = True, mode != "keep"
        await self.ask("pause", "all" if mode == "keep" else "new")
        if mode == "abort":
            await self.ask("abort_all")
        if mode == "wait":
            while (stats := await self.stats()).num_running + stats.num_preempted:
                await asyncio.sleep(POLL_SECONDS)
        if clear_cache and mode != "keep":
            await self.reset_prefix_cache()

    async def resume(self) -> None:
        """End a pause. Nothing happens when there is none."""
        await self.ask("resume")
        self._control.pauses = self._control.refuses_new = False

    pause_generation, resume_generation = pause, resume
    """vLLM's names of them."""

    async def is_paused(self) -> bool:
        """Whether the engine starts no requests because of `pause`."""
        return bool(await self._count("is_paused"))

    async def sleep(self, level: int | str = 1, mode: str | None = None) -> None:
        """Give memory back until `wake_up`: the KV cache, and the weights to host memory where there is a device (level
        1) or altogether (level 2). What was cached is forgotten; requests are rejected meanwhile.

        mode: what happens to requests that live: None refuses to sleep, "abort" ends them, "wait" waits for their end.
        Raises UserError while requests live or prefixes are registered."""
        if mode is not None:
            check_mode(mode)
        control = self._control
        was_asleep, control.is_asleep = control.is_asleep, mode in ("abort", "wait") or control.is_asleep
        try:
            if mode == "abort":
                await self.ask("abort_all")
            while mode == "wait" and (stats := await self.stats()).num_running + stats.num_waiting:
                await asyncio.sleep(POLL_SECONDS)
            await self.ask("sleep", str(level))
        except BaseException:
            control.is_asleep = was_asleep
            raise
        control.is_asleep, control.sleep_level = True, int(level)

    async def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take requests again; nothing is cached. tags: ["weights"] brings back these alone, and ["kv_cache"] the rest
        behind them. Raises InternalError when the memory, or the checkpoint, is gone, UserError for other tags."""
        if not await self._count("wake_up", part_of(tags)):
            self._control.is_asleep, self._control.sleep_level = False, 0

    async def is_sleeping(self) -> bool:
        """Whether requests are rejected because the engine sleeps."""
        return bool(await self._count("is_sleeping"))

    def check_awake(self) -> None:
        """Raise EngineAsleepError while the engine sleeps, as far as the front ends have sent it to sleep."""
        if self._control.is_asleep:
            raise EngineAsleepError("the engine is asleep: wake it up first")

    async def _count(self, method: str, argument: str = "") -> int:
        value = (await self.ask(method, argument)).value
        assert isinstance(value, int)
        return value


def check_reset(reset_connector: bool) -> None:
    """Raise UserError where files are to be forgotten too."""
    if reset_connector:
        message = "reset_connector must be False: files in kv_offload_dir stay, and count again at the next start"
        raise UserError(message, param="reset_connector")


def check_mode(mode: str) -> None:
    """Raise UserError for a mode that is none of MODES."""
    if mode not in MODES:
        raise UserError(f"mode must be one of {', '.join(MODES)}, not {mode!r}", param="mode")
