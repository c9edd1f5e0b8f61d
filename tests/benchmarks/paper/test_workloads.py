from __future__ import annotations

import random
import statistics

import pytest

from benchmarks.paper.workloads import draw
from quire.simulator.workloads import ALPACA, SHAREGPT, Shape, lengths, uncorrelated

TEXT = list(range(5000))


@pytest.mark.parametrize("count", [8, 32, 256])
@pytest.mark.parametrize("mean", [19.31, 58.45, 161.31, 337.99])
def test_lengths_have_the_mean_and_a_heavy_tail(mean: float, count: int) -> None:
    found = lengths(mean, count, 1536)
    assert len(found) == count
    assert found == sorted(found)
    assert statistics.mean(found) == pytest.approx(mean, abs=1.0)
    assert found[0] >= 1
    assert found[-1] <= 1536
    assert statistics.median(found) < 0.8 * mean
    assert found[-1] > 2.2 * mean


def test_pairs_are_uncorrelated() -> None:
    inputs, outputs = lengths(20, 64, 1024), lengths(60, 64, 1024)
    pairs = uncorrelated(inputs, outputs, random.Random(3))
    assert sorted(pair[0] for pair in pairs) == inputs
    assert sorted(pair[1] for pair in pairs) == outputs
    assert abs(statistics.correlation(*zip(*pairs, strict=True))) < 0.01
    assert [pair[0] for pair in pairs] != inputs


@pytest.mark.parametrize("shape", [ALPACA, SHAREGPT], ids=lambda shape: shape.name)
def test_requests(shape: Shape) -> None:
    requests = draw(shape, 64, TEXT, seed=5)
    assert statistics.mean(len(request.token_ids) for request in requests) == pytest.approx(shape.mean_input, abs=1)
    assert statistics.mean(request.output_len for request in requests) == pytest.approx(shape.mean_output, abs=1)
    for request in requests:
        first = request.token_ids[0]
        assert request.token_ids == TEXT[first : first + len(request.token_ids)], "cut from the text"
    assert requests == draw(shape, 64, TEXT, seed=5)
    assert requests != draw(shape, 64, TEXT, seed=6)
