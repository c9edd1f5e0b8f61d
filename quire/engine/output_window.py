"""The outputs of short steps are sent together: a message, and what it wakes, costs the front end about as much for one
token of a sequence as for several."""

from __future__ import annotations

import math

from quire.clock import Clock
from quire.engine.messages import EngineOutputs
from quire.outputs import SequenceUpdate

MANY_SEQUENCES = 8
"""Steps of as many wait for the whole window."""
FEW_SEQUENCES_SHARE = 0.25
"""Of the window, for which steps of fewer sequences wait: there is less to save, and a reader sees single tokens."""
STATS_SECONDS = 0.05
"""How old the front end's statistics may be while nothing but tokens is to be told."""


class OutputWindow:
    """Holds tokens back for `seconds` at most (of few sequences for a share of it), as far as the step before tells how
    long the next one takes; 0: not at all. First tokens, ends, what callers asked for in single steps
    (EngineRequest.each_step) and everything with them is sent at once."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        self._seconds = seconds
        self._clock = clock
        self._held: list[SequenceUpdate] = []
        self._since = 0.0
        """When the step with the first held tokens ended."""
        self._last_end = -math.inf
        """Of a step."""
        self._next_stats = -math.inf
        """When tokens alone are told with statistics."""

    def joined(self, outputs: EngineOutputs, *, goes_on: bool) -> EngineOutputs | None:
        """Take the outputs of a step that has just ended. Returns what is to be sent: these, with what was held; None:
        they are held too. goes_on: whether the next step begins at once."""
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
        """Whether these outputs, which are sent, are to carry statistics."""
        now = self._clock.now()
        if now < self._next_stats and outputs.updates and _can_wait(outputs):
            return False
        self._next_stats = now + STATS_SECONDS
        return True

    def release(self) -> list[SequenceUpdate]:
        """What is held, which the caller sends."""
        held, self._held = self._held, []
        return held


def _can_wait(outputs: EngineOutputs) -> bool:
    if outputs.rejections or outputs.results:
        return False
    for update in outputs.updates:  # a loop, since it is asked of every token
        if update.finish_reason is not None or update.prompt_logprobs is not None:
            return False
        if update.timing is not None and not update.timing.can_wait:
            return False
    return True


def _joined(held: list[SequenceUpdate], updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
    """One list of both. Where they are of the same sequences, as in one step after the other, each later update has the
    tokens of the earlier one in front of its own."""
    if len(held) != len(updates) or any(
        before.request_id != after.request_id or before.index != after.index
        for before, after in zip(held, updates, strict=True)
    ):
        return held + updates
    for before, after in zip(held, updates, strict=True):
        after.new_token_ids = before.new_token_ids + after.new_token_ids
        if before.logprobs is not None:
            after.logprobs = before.logprobs + (after.logprobs or [])
    return updates
