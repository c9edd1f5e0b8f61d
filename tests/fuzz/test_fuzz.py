"""A few seconds of every fuzzer, the same cases each time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.fuzz.harness import Attack, FindingError, Fuzzer, run_fuzzer
from tests.fuzz.registry import FUZZERS
from tests.long import all_but_long

LONG = ("bodies", "templates", "tokenizers", "checkpoints", "native_plans", "media")
"""Fuzzers whose cases take a second or more: most of them start an interpreter with torch."""


@pytest.mark.parametrize(
    "fuzzer",
    all_but_long(FUZZERS, [fuzzer for fuzzer in FUZZERS if fuzzer.name not in LONG]),
    ids=lambda fuzzer: fuzzer.name,
)
def test_nothing_is_found(fuzzer: Fuzzer) -> None:
    assert run_fuzzer(fuzzer, seed=0, num_cases=fuzzer.num_test_cases) == fuzzer.num_test_cases


def test_a_finding_names_the_command_that_repeats_it() -> None:
    tried: list[float] = []

    def attack(rng: random.Random) -> None:
        tried.append(rng.random())
        assert len(tried) != 3, "the third breaks it"

    @contextmanager
    def target() -> Iterator[Attack]:
        yield attack

    fuzzer = Fuzzer("example", target, num_test_cases=9)
    with pytest.raises(
        FindingError, match=r"(?s)the third breaks it.*try it again: .* example --seed 4 --first 2 --cases 1"
    ):
        run_fuzzer(fuzzer, seed=4, num_cases=9)
    broken = tried[2]
    run_fuzzer(fuzzer, seed=4, first=2, num_cases=1)
    assert tried[3] == broken
