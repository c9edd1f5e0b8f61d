"""How many drafts a sequence computes in a step: as many as its drafts so far let expect to be accepted.

Counts alone decide, and no clock, so that every rank and every run of the same requests plans the same steps.
"""

from __future__ import annotations

WEIGHT = 0.25
"""Weight of the last trial in the mean."""
FIRST_MEAN = 2.0
LEAST_MEAN = 0.2
"""Accepted drafts of a trial, below which drafts cost more than they bring: then trials are rare."""
RARE = 16
"""One in as many opportunities is such a trial, of one draft."""


class DraftRecord:
    """The drafts of one sequence. most: drafts of a step at most. mean: accepted drafts of a trial that are expected
    before there was one."""

    __slots__ = ("_most", "_num_left_out", "mean")

    def __init__(self, most: int, mean: float = FIRST_MEAN) -> None:
        self._most = most
        self.mean = min(mean, most)
        self._num_left_out = 0

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """Take in a trial of `num_drafts` (>= 1). Where all were accepted, more would have been."""
        reached = num_accepted if num_accepted < num_drafts else min(2 * num_accepted, self._most)
        self.mean += WEIGHT * (reached - self.mean)

    @property
    def limit(self) -> int:
        """The most drafts of a trial, from 1 on."""
        return 1 + int(1.5 * self.mean) if self.mean >= LEAST_MEAN else 1

    def wants_trial(self) -> bool:
        """The next step may have drafts. Asked once for each step for which there are some."""
        if self.mean >= LEAST_MEAN:
            return True
        self._num_left_out += 1
        return self._num_left_out % RARE == 0
