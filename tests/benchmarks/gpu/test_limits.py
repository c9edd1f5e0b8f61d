"""Limits, and how far a time is from them."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu.limits import Ceilings, Work, measure_ceilings
from benchmarks.gpu.timing import MAX_CALLS, MAX_COPIES, Timing, measure, num_copies, repetitions

CEILINGS = Ceilings(bandwidth=4e12, peak=8e14)


def test_the_higher_floor_is_the_limit() -> None:
    moves, computes = Work(8e9, 8e11), Work(4e9, 1.6e12)
    assert CEILINGS.seconds(moves) == pytest.approx(2e-3)
    assert CEILINGS.bound(moves) == "memory"
    assert CEILINGS.seconds(computes) == pytest.approx(2e-3)
    assert CEILINGS.bound(computes) == "arithmetic"
    assert CEILINGS.share(moves, 4e-3) == pytest.approx(0.5)


def test_a_timing_is_a_median_with_its_spread() -> None:
    timing = Timing((1.0, 3.0, 2.0, 9.0, 4.0))
    assert timing.median == 3.0
    assert timing.spread == pytest.approx(2 / 3)
    assert Timing((2.0,)).spread == 0.0


def test_operands_exceed_the_cache() -> None:
    assert num_copies(100e6, cache_bytes=60_000_000) == 3
    assert num_copies(10e9, cache_bytes=60_000_000) == 1
    assert num_copies(1, cache_bytes=60_000_000) == MAX_COPIES
    assert num_copies(0) == MAX_COPIES


def test_samples_are_long_enough_and_graphs_not_too_large() -> None:
    assert repetitions(1e-3, 2) == 2
    assert repetitions(1.0, 3) == 1
    assert repetitions(1e-9, 4) * 4 <= MAX_CALLS


def test_every_call_is_made() -> None:
    seen: list[int] = []
    timing = measure([lambda: seen.append(0), lambda: seen.append(1)], torch.device("cpu"))
    assert set(seen) == {0, 1}
    assert timing.median > 0


def test_limits_are_measured() -> None:
    ceilings, timings = measure_ceilings(torch.device("cpu"), num_bytes=1 << 16, size=32)
    assert ceilings.bandwidth == pytest.approx(2 * (1 << 16) / timings["copy"].median)
    assert ceilings.peak == pytest.approx(2 * 32**3 / timings["product"].median)
