"""Random numbers without a generator's state: one uniform number per (seed, index), whatever else runs."""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def uniform(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Number `indices[i]` of the stream `seeds[i]`, strictly between 0 and 1.

    seeds: [R] uint64; indices: [R] int64. Returns [R] float64, multiples of 2**-53 with 52 random bits.
    The stream of a seed is SplitMix64 started at a scrambled seed, so that neighbouring seeds are unrelated.
    """
    state = _mix(seeds + _GOLDEN) + (indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    bits = _mix(state) >> np.uint64(12)
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser, a bijection of 64 bits. x: [R] uint64."""
    x = (x ^ (x >> np.uint64(30))) * _MULTIPLIERS[0]
    x = (x ^ (x >> np.uint64(27))) * _MULTIPLIERS[1]
    return x ^ (x >> np.uint64(31))
