"""Rates between frames, from the differences of counters."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from quire.dashboard.frame import Frame

NUM_SAMPLES = 120
WINDOW = 10
"""Samples in a mean: few seconds have more than one request."""


class _Counters(NamedTuple):
    now: float
    tokens: int
    first_sum: float
    first_count: int
    hits: int
    queries: int
    accepted: int = 0
    drafts: int = 0


class History:
    """History of frames added at a steady pace. After the first frame, means cover the time since the server's
    start."""

    def __init__(self) -> None:
        self._counters: deque[_Counters] = deque(maxlen=WINDOW)
        self._values: dict[str, deque[float | None]] = {
            key: deque(maxlen=NUM_SAMPLES) for key in ("tokens", "ttft", "hits", "usage", "drafts")
        }
        self.tokens_per_second: float | None = None
        self.time_to_first_token: float | None = None
        """Seconds; None before any first token."""
        self.hit_rate: float | None = None
        """Share of cached prompt tokens among those looked up; None if there were none."""
        self.acceptance: float | None = None
        """Share of accepted drafts; None if there were none."""

    @property
    def num_samples(self) -> int:
        return len(self._values["usage"])

    def values(self, key: str) -> list[float | None]:
        """Values of `tokens`, `ttft`, `hits`, `usage` or `drafts`, oldest first, for a chart."""
        return list(self._values[key])

    def add_frame(self, frame: Frame, now: float) -> None:
        """Take a frame into the rates. now: seconds of a monotonic clock."""
        stats, first = frame.stats, frame.time_to_first_token
        newest = _Counters(
            now,
            stats.generation_tokens_total,
            first.sum,
            first.count,
            stats.prefix_cache_hits_total,
            stats.prefix_cache_queries_total,
            stats.accepted_draft_tokens_total,
            stats.draft_tokens_total,
        )
        if self._counters and newest.tokens < self._counters[-1].tokens:
            self._counters.clear()  # the server was started again
        last = self._counters[-1] if self._counters else None
        oldest = self._counters[0] if self._counters else _Counters(now, 0, 0.0, 0, 0, 0)
        self._counters.append(newest)
        if last is not None and now > last.now:
            self.tokens_per_second = (newest.tokens - last.tokens) / (now - last.now)
        first_token = _ratio(newest.first_sum - oldest.first_sum, newest.first_count - oldest.first_count)
        hits = _ratio(newest.hits - oldest.hits, newest.queries - oldest.queries)
        self.time_to_first_token = self.time_to_first_token if first_token is None else first_token
        self.hit_rate = self.hit_rate if hits is None else hits
        drafts = _ratio(newest.accepted - oldest.accepted, newest.drafts - oldest.drafts)
        self.acceptance = self.acceptance if drafts is None else drafts
        self._values["drafts"].append(drafts)
        self._values["tokens"].append(self.tokens_per_second)
        self._values["ttft"].append(first_token)
        self._values["hits"].append(hits)
        self._values["usage"].append(stats.num_used_blocks / max(1, stats.num_blocks))


def _ratio(part: float, whole: int) -> float | None:
    return part / whole if whole else None
