from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from quire.bench.serving import arrival_offsets
from quire.errors import UserError


def gaps(rate: float, burstiness: float, seed: int = 0) -> list[float]:
    offsets = arrival_offsets(4000, rate, burstiness, random.Random(seed))
    return [later - earlier for earlier, later in itertools.pairwise(offsets)]


def test_infinite_rate_is_all_at_once() -> None:
    assert arrival_offsets(3, math.inf, 1.0, random.Random(0)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_gamma_distributions_mean_and_variation(burstiness: float) -> None:
    found = gaps(8.0, burstiness)
    mean = statistics.fmean(found)
    assert mean == pytest.approx(1 / 8, rel=0.1)
    # The coefficient of variation of a gamma distribution of shape k is 1 / sqrt(k).
    assert statistics.pstdev(found) / mean == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)


def test_offsets_ascend_from_zero_and_depend_on_the_seed_alone() -> None:
    offsets = arrival_offsets(50, 3.0, 1.0, random.Random(7))
    assert offsets[0] == 0.0
    assert offsets == sorted(offsets)
    assert offsets == arrival_offsets(50, 3.0, 1.0, random.Random(7))
    assert offsets != arrival_offsets(50, 3.0, 1.0, random.Random(8))


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (math.nan, 1), (1, 0), (1, -2), (1, math.nan)])
def test_bad_values(rate: float, burstiness: float) -> None:
    with pytest.raises(UserError):
        arrival_offsets(2, rate, burstiness, random.Random(0))
