"""Samples of the last 15 minutes, taken while the engine works, for the page's charts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from quire.clock import Clock, SystemClock
from quire.engine.output_stream import StatsListener
from quire.kv_cache.stats import EngineStats

SECONDS = 900.0
INTERVAL_SECONDS = 5.0


class TrailSample(msgspec.Struct, frozen=True):
    """Server's counters and gauges at one moment. seconds: age of the sample."""

    seconds: float
    generation_tokens_total: int
    prefix_cache_hits_total: int
    prefix_cache_queries_total: int
    num_running: int
    num_waiting: int
    num_used_blocks: int
    first_token_seconds: float
    """Sum of the times to first token so far."""
    num_first_tokens: int


class Trail(StatsListener):
    """Samples for the live page's charts, at least INTERVAL_SECONDS apart. An idle engine adds none."""

    def __init__(self, first_tokens: Callable[[], tuple[float, int]], clock: Clock | None = None) -> None:
        """Samples of the last 15 minutes. first_tokens: returns sum and number of the times to first token."""
        self._first_tokens = first_tokens
        self._clock = clock or SystemClock()
        self._samples: deque[tuple[float, TrailSample]] = deque(maxlen=2 * int(SECONDS / INTERVAL_SECONDS) + 2)
        """Samples with their times; at most two in an interval."""
        self._latest: EngineStats | None = None
        self._at_rest: tuple[float, TrailSample] | None = None
        """Time of the last snapshot without requests, and its sample."""

    def record_stats(self, stats: EngineStats) -> None:
        now = self._clock.now()
        last = self._samples[-1][0] if self._samples else -SECONDS
        if now - last >= INTERVAL_SECONDS:
            if self._at_rest is not None and self._at_rest[0] > last:
                self._samples.append(self._at_rest)
            self._samples.append((now, self._sample(stats)))
        self._latest = stats
        if not (stats.num_running or stats.num_waiting):
            self._at_rest = now, self._sample(stats)

    def samples(self) -> list[TrailSample]:
        """Samples of the last SECONDS, oldest first, with the present state as the last."""
        now = self._clock.now()
        kept = [*self._samples]
        if self._at_rest is not None and self._at_rest[0] > kept[-1][0]:
            kept.append(self._at_rest)
        if self._latest is not None:
            kept.append((now, self._sample(self._latest)))
        ages = [(round(now - then, 3), sample) for then, sample in kept]
        return [msgspec.structs.replace(sample, seconds=age) for age, sample in ages if age <= SECONDS]

    def _sample(self, stats: EngineStats) -> TrailSample:
        total, count = self._first_tokens()
        return TrailSample(
            0.0,
            stats.generation_tokens_total,
            stats.prefix_cache_hits_total,
            stats.prefix_cache_queries_total,
            stats.num_running,
            stats.num_waiting,
            stats.num_used_blocks,
            total,
            count,
        )
