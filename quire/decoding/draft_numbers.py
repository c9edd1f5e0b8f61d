"""Number of drafts that a sequence computes in a step, from acceptance and the times of steps."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf

DECAY = 0.97
FIRST_CHANCE, FIRST_WEIGHT = 2 / 3, 3.0
LEAST_CHANCE = 1 / 6
"""Chance that a draft needs where no times are known."""
MANY, LEAST_CHANCE_OF_MANY = 8, 1 / 3
"""Sequences of a step that waits for arithmetic, and its LEAST_CHANCE."""
RARE = 16
"""Opportunities for each trial, of one draft, of a sequence whose drafts cost more than they save."""
LEAST_SECONDS = 0.0  # shorter steps, of a clock that stands still, are not compared
FEW = 2
"""Steps of a size before its time counts: the first may be slow."""
TIMES_DECAY, SLOWNESS_DECAY = 1 / 8, 1 / 4
MOST_OUT = 2.0
PLAIN_EVERY = 128
"""Steps with drafts for each without, to learn its time."""
PRICE_EVERY = 4


class StepTimes:
    """Price of a draft. A step's expected time is that of its size times the machine's slowness of late."""

    def __init__(self) -> None:
        self._price: float | None = None
        self._sizes: dict[int, dict[int, _Time]] = {}
        """Sequences -> drafts, both rounded."""
        self._slowness, self._last = 1.0, (0, 0)
        self._num_drafted = self._num_priced = 0

    def note(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """Record a step without prompts. seconds: 0: unknown."""
        if seconds <= LEAST_SECONDS:
            return
        self._num_drafted = self._num_drafted + 1 if num_drafts else 0
        size = _rounded(num_sequences, 3), _rounded(num_drafts, 2)
        time = self._sizes.setdefault(size[0], {}).setdefault(size[1], _Time())
        if time.count < FEW:
            time.note_early(num_drafts, seconds / self._slowness)
        else:
            out = min(max(seconds / (self._slowness * time.seconds), 1 / MOST_OUT), MOST_OUT)
            self._slowness *= out**SLOWNESS_DECAY
            time.note(num_drafts, 1.0 if size == self._last else out ** (1 - SLOWNESS_DECAY))
        self._last = size

    def wants_plain(self, num_sequences: int) -> bool:
        plain = self._sizes.get(_rounded(num_sequences, 3), {}).get(0)
        few = 0 if plain is None else plain.count
        return self._num_drafted >= (PLAIN_EVERY if few >= FEW else 1 + few)

    def price(self, num_sequences: int) -> float:
        """Least chance with which a draft is worth its time."""
        if self._price is not None:
            return self._price
        return LEAST_CHANCE if num_sequences < MANY else LEAST_CHANCE_OF_MANY

    def set_price(self, num_sequences: int, chances: SequenceOf[float], most: int) -> None:
        """Choose the price that brings most tokens a second. chances: each sequence's, of a right draft. most: drafts
        of a sequence."""
        import numpy as np  # front ends import this module, too

        self._num_priced += 1
        if self._price is not None and len(chances) >= MANY and self._num_priced % PRICE_EVERY:
            return
        known = self._known(num_sequences)
        if not known or not chances:
            self._price = None
            return
        gains = np.sort(np.power.outer(np.array(chances), np.arange(1, most + 1)).ravel())[::-1]
        numbers = np.arange(len(gains) + 1)
        drafts, times = np.array([(0.0, 1.0), *_knee(known), *known]).T
        times = np.maximum.accumulate(times)
        steepness = (times[-1] - 1) / drafts[-1]
        taken = np.interp(numbers, drafts, times) + steepness * np.maximum(0, numbers - drafts[-1])
        tokens = num_sequences + np.concatenate(([0.0], np.cumsum(gains)))
        best = int(np.argmax(tokens / taken))
        self._price = float(gains[best - 1]) if best else float(np.nextafter(gains[0], 2))

    def _known(self, num_sequences: int) -> list[tuple[float, float]]:
        """(drafts, time over that without), ascending."""
        times = self._sizes.get(_rounded(num_sequences, 3), {})
        plain = times.get(0)
        if plain is None or plain.count < FEW:
            return []
        found = (time for time in times.values() if time is not plain and time.count >= FEW)
        return sorted((time.drafts, time.seconds / plain.seconds) for time in found)


class DraftRecord:
    """Acceptance of one sequence's drafts so far, which limits its next ones. most: largest number of drafts in a step.
    chance: share of right drafts expected."""

    __slots__ = ("_most", "_num_left_out", "_right", "_times", "_wrong")

    def __init__(self, most: int, chance: float = FIRST_CHANCE, times: StepTimes | None = None) -> None:
        self._most = most
        self._right, self._wrong = FIRST_WEIGHT * chance, FIRST_WEIGHT * (1 - chance)
        self._times = times or StepTimes()
        self._num_left_out = 0

    @property
    def chance(self) -> float:
        return self._right / (self._right + self._wrong)

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """Record a trial of `num_drafts` (>= 1)."""
        num_wrong = num_accepted < num_drafts
        decay = DECAY ** (num_accepted + num_wrong)
        self._right, self._wrong = decay * self._right + num_accepted, decay * self._wrong + num_wrong

    def limit(self, num_sequences: int) -> int:
        """Maximum drafts of a trial, at least 1."""
        chance, price = self.chance, self._times.price(num_sequences)
        if price >= chance:
            return 1
        if chance**self._most >= price:
            return self._most
        return int(math.log(price) / math.log(chance) + 1e-9)

    def wants_trial(self, num_sequences: int = 1) -> bool:
        """True if the next step may have drafts. Called once for each step that could have some. num_sequences: number
        of sequences in the step."""
        if self.chance >= self._times.price(num_sequences):
            return True
        self._num_left_out += 1
        return self._num_left_out % (RARE * max(1, num_sequences // 4)) == 0


def _knee(known: list[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(known) < 2:
        return []
    (first, low), (second, high) = known[:2]
    if not 1 < low < high:
        return []
    knee = first - (low - 1) * (second - first) / (high - low)
    return [(knee, 1.0)] if knee > 0 else []


class _Time:
    """Time of steps of one size. drafts: their mean."""

    __slots__ = ("count", "drafts", "seconds")

    def __init__(self) -> None:
        self.count, self.drafts, self.seconds = 0, 0.0, math.inf

    def note_early(self, drafts: float, seconds: float) -> None:
        self.count += 1
        self.seconds = min(self.seconds, seconds)
        self.drafts += (drafts - self.drafts) / self.count

    def note(self, drafts: float, out: float) -> None:
        self.drafts += TIMES_DECAY * (drafts - self.drafts)
        self.seconds *= out**TIMES_DECAY


def _rounded(number: int, digits: int) -> int:
    dropped = max(0, number.bit_length() - digits)
    return number >> dropped << dropped
