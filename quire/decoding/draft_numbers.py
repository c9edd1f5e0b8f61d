"""Number of drafts that a sequence computes in a step, from the acceptance of its drafts and from the times of steps.

Tokens never depend on it. The number is in the plan, so all ranks agree; a clock that stands still leaves counts alone
to decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf

import numpy as np

DECAY = 0.97
"""Weight of a draft's fate when the next one's is known."""
FIRST_CHANCE, FIRST_WEIGHT = 2 / 3, 3.0
"""Share of right drafts expected of the first sequence, and drafts that an expectation counts as."""
LEAST_CHANCE = 1 / 6
"""Chance below which a draft costs more than it saves, where no times are known."""
MANY, LEAST_CHANCE_OF_MANY = 8, 1 / 3
"""Sequences of a step from which on it waits for arithmetic, and LEAST_CHANCE of such a step."""
RARE = 16
"""Opportunities for each trial of a sequence whose drafts cost more than they save; it then has one draft."""
FEW = 2
"""Steps of one size that are compared before their time counts; the first may be slow."""
TIMES_DECAY, SPEED_DECAY = 1 / 8, 1 / 4
MOST_OUT = 2.0
"""Factor by which a step's time differs from the expected one at most, as far as it counts."""
PLAIN_EVERY = 128
"""Steps with drafts for each step without, which tells what these would take."""
PRICE_EVERY = 4
"""Steps for each new price among MANY sequences."""


class StepTimes:
    """Price of a draft, from the times of steps with and without drafts. A step's expected time is the machine's speed
    of late, which all steps share, times that of its size, which is learned where sizes change."""

    def __init__(self) -> None:
        self._price: float | None = None
        self._sizes: dict[int, dict[int, _Time]] = {}
        """Class of number of sequences -> class of number of drafts (0: none)."""
        self._speed, self._last = 1.0, (0, 0)
        self._num_drafted = self._num_priced = 0

    def note(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """Record a step without prompts. seconds: since the last one ended; 0: unknown."""
        if seconds <= 0:
            return
        self._num_drafted = self._num_drafted + 1 if num_drafts else 0
        size = _rounded(num_sequences, 3), _rounded(num_drafts, 2)
        time = self._sizes.setdefault(size[0], {}).setdefault(size[1], _Time())
        if time.count < FEW:
            time.begin(num_drafts, seconds / self._speed)
        else:
            out = min(max(seconds / (self._speed * time.seconds), 1 / MOST_OUT), MOST_OUT)
            self._speed *= out**SPEED_DECAY
            time.note(num_drafts, 1.0 if size == self._last else out ** (1 - SPEED_DECAY))
        self._last = size

    def wants_plain(self, num_sequences: int) -> bool:
        """True if the next step is to have no drafts, because the time of such a step is not known."""
        plain = self._sizes.get(_rounded(num_sequences, 3), {}).get(0)
        few = 0 if plain is None else plain.count
        return self._num_drafted >= (PLAIN_EVERY if few >= FEW else 1 + few)

    def price(self, num_sequences: int) -> float:
        """Least chance with which a draft is worth its time in a step of so many sequences."""
        if self._price is not None:
            return self._price
        return LEAST_CHANCE if num_sequences < MANY else LEAST_CHANCE_OF_MANY

    def set_price(self, num_sequences: int, chances: SequenceOf[float], most: int) -> None:
        """Choose the price which brings most tokens a second. chances: of a right draft, for each sequence that has
        drafts. most: drafts of a sequence."""
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
        """(drafts, time over that without) of steps with as many sequences, ascending."""
        times = self._sizes.get(_rounded(num_sequences, 3), {})
        plain = times.get(0)
        if plain is None or plain.count < FEW:
            return []
        found = (time for time in times.values() if time is not plain and time.count >= FEW)
        return sorted((time.drafts, time.seconds / plain.seconds) for time in found)


class DraftRecord:
    """Acceptance of one sequence's drafts so far, which limits its next ones. most: largest number of drafts in a step.
    chance: of a right draft, expected of the first trial. times: prices of drafts."""

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
        """Record a trial of `num_drafts` (>= 1). Drafts behind a wrong one tell nothing."""
        num_wrong = num_accepted < num_drafts
        decay = DECAY ** (num_accepted + num_wrong)
        self._right, self._wrong = decay * self._right + num_accepted, decay * self._wrong + num_wrong

    def limit(self, num_sequences: int) -> int:
        """Maximum drafts of a trial, at least 1: those that are reached with a chance of at least the price."""
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
    """Point up to which drafts may take no time, for all that steps with more of them say; it is tried then."""
    if len(known) < 2:
        return []
    (first, low), (second, high) = known[:2]
    if not 1 < low < high:
        return []
    knee = first - (low - 1) * (second - first) / (high - low)
    return [(knee, 1.0)] if knee > 0 else []


class _Time:
    """Time of steps of one size at a speed of 1. drafts: mean number of drafts."""

    __slots__ = ("count", "drafts", "seconds")

    def __init__(self) -> None:
        self.count, self.drafts, self.seconds = 0, 0.0, math.inf

    def begin(self, drafts: float, seconds: float) -> None:
        self.count += 1
        self.seconds = min(self.seconds, seconds)
        self.drafts += (drafts - self.drafts) / self.count

    def note(self, drafts: float, out: float) -> None:
        """out: time over the expected one."""
        self.drafts += TIMES_DECAY * (drafts - self.drafts)
        self.seconds *= out**TIMES_DECAY


def _rounded(number: int, digits: int) -> int:
    """Number, rounded down to so many binary digits."""
    dropped = max(0, number.bit_length() - digits)
    return number >> dropped << dropped
