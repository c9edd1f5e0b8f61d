"""Progress and phases of requests, for the engine's listeners."""

from __future__ import annotations

from typing import NamedTuple

from quire.outputs import CompletionOutput, RequestOutput


class PhaseTimes(NamedTuple):
    """Seconds of the consecutive phases (queue, prefill, decode) of a request that got a token. Used by metrics, logs
    and traces."""

    queue: float
    """Arrival to first step."""
    prefill: float
    """First step to first token."""
    decode: float
    """First to last token."""

    @property
    def to_first_token(self) -> float:
        return self.queue + self.prefill

    @property
    def inference(self) -> float:
        return self.prefill + self.decode

    @property
    def total(self) -> float:
        return self.queue + self.prefill + self.decode


class RequestProgress:
    """Progress of one request from its first output, by deltas. Times are of the front end's clock."""

    __slots__ = ("_last_times", "first_output_time", "num_tokens")

    def __init__(self, now: float) -> None:
        self.first_output_time = now
        self.num_tokens: dict[int, int] = {}
        """Tokens so far, by sequence."""
        self._last_times: dict[int, float] = {}

    def observe_tokens(self, completion: CompletionOutput, now: float) -> float | None:
        """Count a delta; return the mean seconds between its tokens, from the delta before; None for the first and an
        empty one."""
        count, index = len(completion.token_ids), completion.index
        if not count:
            return None
        last = self._last_times.get(index)
        self._last_times[index] = now
        self.num_tokens[index] = self.num_tokens.get(index, 0) + count
        return None if last is None else (now - last) / count

    @property
    def num_generated(self) -> int:
        return sum(self.num_tokens.values())

    @property
    def longest(self) -> int:
        return max(self.num_tokens.values(), default=0)

    def phases(self, last: RequestOutput, now: float) -> PhaseTimes | None:
        """Durations of the phases, from the last output; None without a token."""
        queued, first = last.metrics.queue_time, last.metrics.time_to_first_token
        return PhaseTimes(queued, first - queued, now - self.first_output_time) if first else None
