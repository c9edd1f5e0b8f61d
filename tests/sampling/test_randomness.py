"""One uniform number per (seed, index)."""

from __future__ import annotations

import numpy as np
import pytest

from quire.sampling.draw import uniform


def numbers(seed: int, count: int) -> np.ndarray:
    return uniform(np.full(count, seed, np.uint64), np.arange(count))


def test_known_values_never_change() -> None:
    """Users' seeds mean the same tokens in every release."""
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    for seed, index in [(0, 0), (1, 0), (0, 1), (2**64 - 1, 5), (1234567, 10**6)]:
        state = (mix((seed + golden) & mask) + (index + 1) * golden) & mask
        expected = ((mix(state) >> 12) + 0.5) / 2**52
        actual = uniform(np.array([seed], np.uint64), np.array([index]))[0]
        assert actual == expected


def test_depends_on_nothing_but_seed_and_index() -> None:
    rng = np.random.default_rng(0)
    seeds, indices = rng.integers(0, 2**63, 1000).astype(np.uint64), rng.integers(0, 5000, 1000)
    together = uniform(seeds, indices)
    alone = [uniform(seeds[i : i + 1], indices[i : i + 1])[0] for i in range(1000)]
    assert together.tolist() == alone


def test_strictly_inside_the_unit_interval() -> None:
    values = uniform(np.arange(200_000, dtype=np.uint64), np.zeros(200_000, np.int64))
    assert values.min() > 0
    assert values.max() < 1
    largest = (float(2**52 - 1) + 0.5) * 2.0**-52
    assert largest < 1


@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_a_stream_is_uniform_and_uncorrelated(seed: int) -> None:
    values = numbers(seed, 50_000)
    counts = np.bincount((values * 100).astype(int), minlength=100)
    chi_square = ((counts - 500) ** 2 / 500).sum()
    assert chi_square < 149  # 99 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02


def test_neighbouring_seeds_are_unrelated() -> None:
    """The n sequences of a request, and users who count 1, 2, 3, rely on it."""
    first_numbers = uniform(np.arange(50_000, dtype=np.uint64), np.zeros(50_000, np.int64))
    counts = np.bincount((first_numbers * 100).astype(int), minlength=100)
    assert ((counts - 500) ** 2 / 500).sum() < 149
    assert abs(np.corrcoef(numbers(7, 20_000), numbers(8, 20_000))[0, 1]) < 0.03
    assert abs(np.corrcoef(numbers(7, 20_000)[1:], numbers(8, 20_000)[:-1])[0, 1]) < 0.03
