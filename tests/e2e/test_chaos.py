"""A few rounds of `make chaos`: a rank that is killed, where no other engine may start, and one that is stopped."""

from __future__ import annotations

import pytest

from tests.chaos import Expected, play_round

SEEDS = (18, 23)


@pytest.mark.long
def test_rounds() -> None:
    expected = Expected()
    told = [play_round(seed, expected) for seed in SEEDS]
    assert told == ["seed 18: pp: SIGKILL of a rank, and no other engine", "seed 23: ep: SIGSTOP of a rank"]
