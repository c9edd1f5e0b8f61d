from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

import msgspec

from quire.metrics.progress import RequestProgress
from quire.outputs import RequestOutput

KEPT, SHOWN = 200, 20


class EndedRequest(msgspec.Struct, frozen=True):
    """Request that has ended, for the live page. finish_reasons: reasons of its sequences, once each. Times are in
    seconds, None without a token."""

    request_id: str
    finish_reasons: list[str]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated: int
    time_to_first_token: float | None
    seconds: float | None
    """Arrival to last token."""


class Percentiles(msgspec.Struct, frozen=True):
    """Median and 95th percentile of the kept requests, in seconds."""

    p50: float
    p95: float


class Recent(msgspec.Struct, frozen=True):
    """Latest ended requests, newest first, and percentiles of the kept ones."""

    ended: list[EndedRequest] = []
    time_to_first_token: Percentiles | None = None
    seconds: Percentiles | None = None


class RecentRequests:
    """Latest ended requests of this process for the live page; `EngineMetrics` reports them."""

    def __init__(self) -> None:
        self._ended: deque[EndedRequest] = deque(maxlen=KEPT)

    def note(self, output: RequestOutput, progress: RequestProgress, now: float) -> None:
        self._ended.appendleft(_ended(output, progress, now))

    def recent(self) -> Recent:
        firsts = [each.time_to_first_token for each in self._ended]
        return Recent(
            list(islice(self._ended, SHOWN)), _percentiles(firsts), _percentiles(each.seconds for each in self._ended)
        )


def _ended(output: RequestOutput, progress: RequestProgress, now: float) -> EndedRequest:
    times = progress.phases(output, now)
    return EndedRequest(
        output.request_id,
        sorted({each.finish_reason for each in output.outputs if each.finish_reason is not None}),
        len(output.prompt_token_ids),
        output.num_cached_tokens,
        progress.num_generated,
        None if times is None else times.to_first_token,
        None if times is None else times.total,
    )


def _percentiles(values: Iterable[float | None]) -> Percentiles | None:
    found = sorted(value for value in values if value is not None)
    if not found:
        return None
    return Percentiles(found[(len(found) - 1) // 2], found[(95 * (len(found) - 1) + 99) // 100])
