"""What a fuzzer is, and the loop that runs one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

Attack: TypeAlias = Callable[[random.Random], None]
"""Makes one case from the generator and tries it. Raises AssertionError when the target broke a promise."""


@dataclass(frozen=True, slots=True)
class Fuzzer:
    """`target` opens what is attacked (a server, a parser, a directory) and yields the attack.

    Leaving it closes the target and checks what holds at the end: memory, processes, files. `num_test_cases`: how many
    cases `make test` tries, a few seconds' worth.
    """

    name: str
    target: Callable[[], AbstractContextManager[Attack]]
    num_test_cases: int


class FindingError(AssertionError):
    """A case that broke a promise, with the command that tries it again."""


def run_fuzzer(
    fuzzer: Fuzzer, *, seed: int, first: int = 0, num_cases: int | None, seconds: float | None = None
) -> int:
    """Try cases from number `first` on, until `num_cases` are tried or `seconds` have passed, and return how many were.

    A case depends on (fuzzer, seed, number) alone. Raises FindingError for the first that fails.
    """
    end = None if seconds is None else time.monotonic() + seconds
    number = first
    with fuzzer.target() as attack:
        while (num_cases is None or number < first + num_cases) and (end is None or time.monotonic() < end):
            try:
                attack(random.Random(f"{fuzzer.name} {seed} {number}"))
            except Exception as error:
                again = f"python -m tests.fuzz {fuzzer.name} --seed {seed} --first {number} --cases 1"
                raise FindingError(f"{type(error).__name__}: {error}\ntry it again: {again}") from error
            number += 1
    return number - first
