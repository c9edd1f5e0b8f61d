"""Joint sending of short steps' outputs, which costs the front end little more than one output."""

from __future__ import annotations

import math

from quire.clock import Clock
from quire.engine.messages import EngineOutputs
from quire.outputs import SequenceUpdate

MANY_SEQUENCES = 8
"""Sequences from which a step's outputs may wait for the whole window."""
FEW_SEQUENCES_SHARE = 0.25
"""Share of the output window that tokens wait for when few sequences run."""
STATS_SECONDS = 0.05
"""Maximum age in seconds of the front end's statistics while only tokens are sent."""


class OutputWindow:
    """Holds tokens back for at most `seconds` (a share of it for few sequences; 0: never), judged by the last step's
    duration. First tokens, ends and requests with EngineRequest.each_step are sent at once, with all held."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        self._seconds = seconds
        self._clock = clock
        self._held: list[SequenceUpdate] = []
        self._since = 0.0
        """End time of the step with the first held tokens."""
        self._last_end = -math.inf
        self._next_stats = -math.inf
        """Earliest time at which outputs with only tokens carry statistics."""

    def joined(self, outputs: EngineOutputs, *, goes_on: bool) -> EngineOutputs | None:
        """Join a step's outputs with held ones. Returns the outputs to send; None if held. goes_on: the next step
        starts at once."""
        if not self._seconds:
            return outputs
        now = self._clock.now()
        duration, self._last_end = now - self._last_end, now
        since = self._since if self._held else now
        share = 1.0 if len(outputs.updates) >= MANY_SEQUENCES else FEW_SEQUENCES_SHARE
        in_time = now - since + duration <= share * self._seconds
        is_held = goes_on and in_time and bool(outputs.updates) and _can_wait(outputs)
        updates = _joined(self._held, outputs.updates) if self._held else outputs.updates
        if is_held:
            self._held, self._since = updates, since
            return None
        outputs.updates, self._held = updates, []
        return outputs

    def wants_stats(self, outputs: EngineOutputs) -> bool:
        """True if these outputs should carry statistics."""
        now = self._clock.now()
        if now < self._next_stats and outputs.updates and _can_wait(outputs):
            return False
        self._next_stats = now + STATS_SECONDS
        return True

    def release(self) -> list[SequenceUpdate]:
        held, self._held = self._held, []
        return held


def _can_wait(outputs: EngineOutputs) -> bool:
    if outputs.rejections or outputs.results:
        return False
    for update in outputs.updates:  # a plain loop for speed: this runs for every token
        if update.finish_reason is not None or update.prompt_logprobs is not None:
            return False
        if update.timing is not None and not update.timing.can_wait:
            return False
    return True


def _joined(held: list[SequenceUpdate], updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
    if len(held) != len(updates) or any(
        before.request_id != after.request_id or before.index != after.index
        for before, after in zip(held, updates, strict=True)
    ):
        return held + updates
    for before, after in zip(held, updates, strict=True):
        after.new_token_ids = before.new_token_ids + after.new_token_ids
        after.drafts = before.drafts + after.drafts
        if before.logprobs is not None:
            after.logprobs = before.logprobs + (after.logprobs or [])
    return updates
