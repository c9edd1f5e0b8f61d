from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from quire.clock import Clock, SystemClock
from quire.kv_cache.stats import EngineStats, shares
from quire.logging import note
from quire.server.settings import ServerSettings

INTERVAL_SECONDS = 10.0


class StatsLog:
    """Log with one line for each interval in which the engine worked."""

    def __init__(self, read: Callable[[], EngineStats], clock: Clock | None = None) -> None:
        """read: returns the engine's last snapshot. Its counters never decrease."""
        self._read = read
        self._clock = clock or SystemClock()
        self._time = self._clock.now()
        self._last = read()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            self.log()

    def log(self) -> None:
        """Log the work since the last call: requests now, tokens per second, `quire.kv_cache.stats.shares`, and the
        prefix hit rate."""
        now, stats, last = self._clock.now(), self._read(), self._last
        seconds, self._time, self._last = now - self._time, now, stats
        if not (stats.num_running or stats.num_waiting or stats.steps_total > last.steps_total):
            return
        usage = shares(stats)["kv_cache_usage"]
        num_prompt = stats.prompt_tokens_total - last.prompt_tokens_total
        num_generated = stats.generation_tokens_total - last.generation_tokens_total
        num_found = stats.prefix_cache_hits_total - last.prefix_cache_hits_total
        num_looked_up = stats.prefix_cache_queries_total - last.prefix_cache_queries_total
        hit_rate = num_found / num_looked_up if num_looked_up else 0.0
        fields = {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "prompt_tokens_per_second": round(num_prompt / seconds, 1),
            "generation_tokens_per_second": round(num_generated / seconds, 1),
            "kv_cache_usage": round(usage, 4),
            "prefix_cache_hit_rate": round(hit_rate, 4),
        }
        note(
            __name__,
            "%d running, %d waiting; %.1f prompt tokens/s, %.1f generated tokens/s; KV cache %.1f %% used; "
            "prefix hits %.1f %%",
            stats.num_running,
            stats.num_waiting,
            num_prompt / seconds,
            num_generated / seconds,
            100 * usage,
            100 * hit_rate,
            fields=fields,
        )


@contextlib.contextmanager
def log_stats(settings: ServerSettings, read: Callable[[], EngineStats]) -> Iterator[None]:
    """Log during the context, unless the settings forbid it. Needs a running event loop. read: see StatsLog."""
    task = None if settings.disable_log_stats else asyncio.ensure_future(StatsLog(read).run())
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
