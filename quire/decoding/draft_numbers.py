"""Number of drafts that a sequence computes in a step, from the acceptance of its drafts so far.

Only counts decide, no clock, so every rank and run plans the same steps.
"""

from __future__ import annotations

WEIGHT = 0.25
"""Weight of the latest trial in a sequence's mean number of accepted drafts."""
FIRST_MEAN = 2.0
LEAST_MEAN = 0.2
"""Accepted drafts per trial below which drafts cost more than they save: trials become rare."""
RARE = 16
"""Opportunities for each trial of a sequence below LEAST_MEAN, which then has one draft."""
MANY = 8
"""Sequences of a step from which on it waits for arithmetic."""
LEAST_MEAN_OF_MANY = 0.5
"""LEAST_MEAN of a step with MANY sequences."""


class DraftRecord:
    """Acceptance of one sequence's drafts so far, which limits its next ones. most: largest number of drafts in a step.
    mean: accepted drafts expected of the first trial."""

    __slots__ = ("_most", "_num_left_out", "mean")

    def __init__(self, most: int, mean: float = FIRST_MEAN) -> None:
        self._most = most
        self.mean = min(mean, most)
        self._num_left_out = 0

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """Record a trial of `num_drafts` (>= 1). If all were accepted, it counts as twice as many, at most `most`."""
        reached = num_accepted if num_accepted < num_drafts else min(2 * num_accepted, self._most)
        self.mean += WEIGHT * (reached - self.mean)

    @property
    def limit(self) -> int:
        """Maximum drafts of a trial, at least 1."""
        return 1 + int(1.5 * self.mean) if self.mean >= LEAST_MEAN else 1

    def wants_trial(self, num_sequences: int = 1) -> bool:
        """True if the next step may have drafts. Called once for each step that could have some. num_sequences: number
        of sequences in the step."""
        is_busy = num_sequences >= MANY
        if self.mean >= (LEAST_MEAN_OF_MANY if is_busy else LEAST_MEAN):
            return True
        self._num_left_out += 1
        return self._num_left_out % (RARE * (num_sequences // 4 if is_busy else 1)) == 0
